"""The study's commands, run from a checkout: `python -m examples.study {make-dataset,run,report} ...`."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stts_hf.cli.options import count, share
from stts_hf.errors import is_disk_full
from stts_hf.training.answer_loss import ANSWER_LOSSES

from .distraction import KINDS, Look
from .methods import METHODS
from .study import SPLITS


def pair(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, whose value is a number, true, false, or a word."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be like NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def rate(text: str) -> tuple[str, float]:
    """`PART=RATE`."""
    name, value = pair(text)
    return name, float(value)


SHARES: dict[str, Any] = {"nargs": 2, "type": share, "metavar": ("LOW", "HIGH")}
# Option: what it takes. Fields of the study's `Settings`; those left out are as the folder has them, or defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "steps": {"type": count, "metavar": "N", "help": "training steps of a run (default: 200)"},
    "batch_size": {"type": count, "metavar": "B", "help": "clips with their conversations in a step (default: 16)"},
    "warmup_steps": {"type": int, "metavar": "N", "help": "warm-up steps before the cosine schedule (default: 10)"},
    "ratio_range": SHARES | {"help": "between which videos draw their pruning ratio in training (default: 0.1 0.95)"},
    "scorer_rate": {"type": float, "metavar": "RATE", "help": "peak while a new scorer is alone (default: 2e-3)"},
    "scorer_steps": {"type": int, "metavar": "N", "help": "of them by the temporal loss (default: 0)"},
    "answers_steps": {"type": count, "metavar": "N", "help": "of them by answers (default: 2000)"},
    "mask_ratios": SHARES | {"help": "between which keep masks draw what they drop (default: 0.5 0.9)"},
    "num_masks": {"type": count, "metavar": "N", "help": "keep masks of a clip in a round (default: 12)"},
    "mask_rounds": {"type": count, "metavar": "N", "help": "rounds of keep masks (default: 2)"},
    "answer_loss": {"choices": ANSWER_LOSSES, "help": "what a keep mask costs (default: divergence)"},
    "split": {"choices": SPLITS, "help": "whose clips are asked about (default: test)"},
    "without_options": {"action": "store_true", "default": None, "help": "ask questions without showing their options"},
    "learning_rates": {"nargs": "+", "type": rate, "metavar": "PART=RATE", "help": "peak rates (default: the paper's)"},
    "model_settings": {"nargs": "+", "type": pair, "metavar": "NAME=VALUE", "help": "such as temporal_loss_weight=0.5"},
    "seeds": {"nargs": "+", "type": int, "metavar": "SEED", "help": "(default: 0 1 2 3 4)"},
    "ratios": {"nargs": "+", "type": share, "metavar": "K", "help": "pruning ratios (default: 0.5 0.7 0.8 0.9)"},
    "layers": {"nargs": "+", "type": int, "metavar": "L", "help": "further pruning layers of STTS (default: none)"},
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    kinds = "; ".join(f"{style}: {', '.join(names)}" for style, names in KINDS.items())
    parser = argparse.ArgumentParser(prog="python -m examples.study", description="The study of pruning methods.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("make-dataset", help="make synthetic clips and questions about them")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; must not be there yet")
    for split in ("train", "validation", "test"):
        command.add_argument(f"--{split}", type=count, metavar="N", help=f"clips and pictures of the {split} split")
    command.add_argument("--seed", type=int, default=0, help="of all scenes (default: 0)")
    command.add_argument("--distraction", type=float, default=1.0, metavar="S", help="0 none, 1 all (default: 1)")
    command.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help=f"of it (default: {kinds})")
    command.add_argument("--style", default="plain", help="plain, or other: looks that training never sees")
    shares = ("photographs", 0.3, "clips before a photograph"), ("films", 0.0, "clips before a film")
    for name, default, what in (*shares, ("calm", 0.0, "training clips without distraction")):
        words = f"share of {what} (default: {default:g})"
        command.add_argument(f"--{name}", type=float, default=default, metavar="SHARE", help=words)
    command.add_argument("--sizes", nargs="+", type=count, default=[], metavar="PX", help="of the files (default: 144)")
    command.set_defaults(execute=make)

    command = commands.add_parser("run", help="train and evaluate every method, and write the report")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="of the study: begun there, or gone on with")
    command.add_argument("--dataset", type=Path, metavar="DATA", required=True, help="made by make-dataset")
    command.add_argument("--base", type=Path, metavar="CHECKPOINT", required=True, help="unpruned model to start from")
    tests: dict[str, Any] = {"type": pair, "metavar": "NAME=DATA", "help": "data sets that are asked about too"}
    command.add_argument("--tests", nargs="+", default=[], **tests)
    command.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD", help=f"some of {', '.join(METHODS)}")
    command.add_argument("--workers", type=count, default=1, metavar="N", help="processes at a time (default: 1)")
    command.add_argument("--keep-checkpoints", action="store_true", help="keep trained models in FOLDER/checkpoints")
    command.add_argument("--plan", action="store_true", help="print the runs and which are done, and stop")
    settings = command.add_argument_group("settings of all runs; those of a study that was begun stay, lists may grow")
    for name, options in SETTINGS.items():
        settings.add_argument(f"--{name.replace('_', '-')}", **options)
    command.set_defaults(execute=run)

    command = commands.add_parser("report", help="write the report of the runs that are done")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="of the study, or of a report")
    command.add_argument("--output", type=Path, metavar="FOLDER", help="of page and records (default: FOLDER)")
    command.set_defaults(execute=report)
    return parser


def make(arguments: argparse.Namespace) -> int:
    """Makes a data set."""
    from .make_dataset import SPLITS, make_dataset

    clips = {split: getattr(arguments, split) or number for split, number in SPLITS.items()}
    options = {name: getattr(arguments, name) for name in ("style", "photographs", "calm", "films")}
    look = Look(arguments.distraction, tuple(arguments.kinds), sizes=tuple(arguments.sizes), **options)
    for done, total in make_dataset(arguments.folder, clips, arguments.seed, look):
        if done % 100 == 0 or done == total:
            note(f"{done} of {total} clips")
    print(arguments.folder)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Does what is not done yet of the runs asked for, and writes the report. Returns 1 where runs failed."""
    from .report import check_output, write_report
    from .runs import do_runs, runs_to_do
    from .study import expected_hours, open_study, plan, read_records

    check_output(arguments.folder)
    given = settings_of(arguments)
    tests = {name: Path(str(folder)) for name, folder in arguments.tests}
    places = (arguments.folder, arguments.dataset, arguments.base)
    study = open_study(*places, given, tests=tests, write=not arguments.plan)
    only = arguments.only or ()
    runs = plan(study.settings, only)
    left = runs_to_do(study, runs, only)
    note(f"{len(runs)} runs, {len(runs) - len(left)} of them done, in {arguments.folder}")
    hours, source = expected_hours(read_records(study.folder, study.settings), left, arguments.workers)
    note(f"The other {len(left)} take about {hours:.1f} hours with --workers {arguments.workers} (from {source})")
    if arguments.plan:
        print("\n".join(f"{'to do' if one in left else 'done':<7}{one.name}" for one in runs))
        return 0
    failed = do_runs(study, left, note, only, workers=arguments.workers, keep_checkpoints=arguments.keep_checkpoints)
    if len(failed) < len(runs):
        write_report(arguments.folder, arguments.folder)
    for one in failed:
        note(f"run {one.name} failed; the same command tries it again")
    return 1 if failed else 0


def report(arguments: argparse.Namespace) -> int:
    """Writes the report of the records there are."""
    from .report import write_report

    write_report(arguments.folder, arguments.output or arguments.folder)
    return 0


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given."""
    from stts_hf.training.arguments import PAPER_LEARNING_RATES

    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if "model_settings" in given:
        given["model_settings"] = dict(given["model_settings"])
    if "learning_rates" in given:
        given["learning_rates"] = PAPER_LEARNING_RATES | dict(given["learning_rates"])
    return given


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status: 2, and one line on stderr, for what the user can mend."""
    arguments = build_parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the command as Ctrl-C does
    try:
        status: int = arguments.execute(arguments)
        return status
    except (ValueError, OSError) as error:
        more = "; what is done is kept: make room, and give the command again" if is_disk_full(error) else ""
        note(f"{arguments.command}: error: {error}{more}")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
