"""`stts-hf study FOLDER`: trains and evaluates every method, and writes the paper's tables in the numbers found."""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from stts_hf.cli.errors import CommandError, need_extras
from stts_hf.cli.options import check_writable, count, share
from stts_hf.cli.progress import keep_bars_out_of_logs, note
from stts_hf.shortages import is_disk_full

HELP = "train and evaluate every pruning method on a data set of make-dataset, and write the tables"

PARTS = ("methods", "ratios", "layers", "scaling", "images", "motion")
# Option: what it takes. Fields of the study's `Settings`; those left out are as the folder has them, or defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "steps": {"type": count, "metavar": "N", "help": "training steps of a run (default: 200)"},
    "batch_size": {"type": count, "metavar": "B", "help": "clips with their conversations in a step (default: 16)"},
    "warmup_steps": {"type": int, "metavar": "N", "help": "steps of warm-up, before a cosine schedule (default: 10)"},
    "scorer_steps": {
        "type": int,
        "metavar": "N",
        "help": "steps of a new scorer by the temporal loss alone, before the others (default: 0)",
    },
    "without_options": {
        "action": "store_true",
        "default": None,
        "help": "ask questions that have options without them, of a model that guesses among options",
    },
    "learning_rates": {"nargs": "+", "metavar": "PART=RATE", "help": "peak rate of a part (default: the paper's)"},
    "model_settings": {
        "nargs": "+",
        "metavar": "NAME=VALUE",
        "help": "such as temporal_loss_weight=0.5 (default: none)",
    },
    "seeds": {"nargs": "+", "type": int, "metavar": "SEED", "help": "(default: 0 1 2)"},
    "ratios": {"nargs": "+", "type": share, "metavar": "K", "help": "pruning ratios (default: 0.5 0.7 0.8 0.9)"},
    "layers": {"nargs": "+", "type": int, "metavar": "L", "help": "pruning layers (default: 0 1 2 3)"},
    "layer_ratios": {"nargs": "+", "type": share, "metavar": "K", "help": "ratios of the layers (default: 0.5)"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the study: begun there, or gone on with")
    parser.add_argument("--dataset", type=Path, metavar="DATA", help="what stts-hf make-dataset made")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="the unpruned model that every run starts from")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--workers", type=count, metavar="N", help="processes, that share the cores alike (default: 1)")
    parser.add_argument("--keep-checkpoints", action="store_true", help="keep the trained models in FOLDER/checkpoints")
    parser.add_argument("--plan", action="store_true", help="say which runs there are and which are done, and stop")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the report of what is done")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the report and all records (default: FOLDER)")
    settings = parser.add_argument_group("settings of all runs; those of a study that was begun stay, lists may grow")
    for name, options in SETTINGS.items():
        settings.add_argument(f"--{name.replace('_', '-')}", **options)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns its exit status, 1 where runs failed; raises `CommandError` for the user's mistakes."""
    need_extras("A study needs more packages", "train", "bench")
    from stts_hf.data.rows import RowError
    from stts_hf.evaluation.study_data import StudyError

    keep_bars_out_of_logs()
    output = arguments.output or arguments.folder
    for option, folder in (("FOLDER", arguments.folder), ("--output", output)):
        check_writable(option, folder)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the command as Ctrl-C does
    try:
        return report(arguments, output) if arguments.report_only else run(arguments, output)
    except (StudyError, RowError) as error:
        raise CommandError(str(error)) from error
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise CommandError(
            f"no space is left on the disk of {arguments.folder}: {error}. What is done is kept: free some, and give "
            "the same command again"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace, output: Path) -> int:
    """Does what is not done yet of the parts asked for, and writes the report."""
    from stts_hf.evaluation.study import open_study, plan
    from stts_hf.evaluation.study_report import check_output, write_report
    from stts_hf.evaluation.study_runs import run_study

    for name in ("dataset", "base"):
        if getattr(arguments, name) is None:
            raise CommandError(f"--{name} is needed; only --report-only goes without")
    check_output(output)
    given = settings_of(arguments)
    study = open_study(arguments.folder, arguments.dataset, arguments.base, given, write=not arguments.plan)
    runs = plan(study.settings, arguments.only or PARTS)
    done = [study.is_over(run) and not study.has_failed(run) for run in runs]
    note(f"stts-hf study: {len(runs)} runs, {sum(done)} of them done, in {arguments.folder}")
    if arguments.plan:
        print("\n".join(f"{'done' if it else 'to do':<7}{run.name}" for it, run in zip(done, runs, strict=True)))
        return 0
    failed = run_study(study, runs, note, workers=arguments.workers or 1, keep_checkpoints=arguments.keep_checkpoints)
    if len(failed) < len(runs):
        write_report(arguments.folder, output)
        note(f"stts-hf study: report in {output}")
    for run in failed:
        note(f"stts-hf study: error: run {run.name} failed; the same command tries it again")
    return 1 if failed else 0


def report(arguments: argparse.Namespace, output: Path) -> int:
    """Writes the report of the records there are."""
    from stts_hf.evaluation.study_report import write_report

    given = [*settings_of(arguments), "dataset", "base", "only", "workers", "plan", "keep_checkpoints"]
    if used := [name for name in given if getattr(arguments, name)]:
        raise CommandError(f"--report-only runs nothing, so --{used[0].replace('_', '-')} would have no effect")
    write_report(arguments.folder, output)
    return 0


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given. Raises `CommandError` for pairs that cannot be read."""
    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if "model_settings" in given:
        given["model_settings"] = read_pairs("--model-settings", given["model_settings"])
    if "learning_rates" in given:
        from stts_hf.training.arguments import PAPER_LEARNING_RATES

        given["learning_rates"] = PAPER_LEARNING_RATES | read_pairs("--learning-rates", given["learning_rates"])
    return given


def read_pairs(option: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """`NAME=VALUE` each: a number, true, false, or a word."""
    read = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise CommandError(f"{option} {pair!r} must be like NAME=VALUE")
        try:
            read[name] = json.loads(value)
        except ValueError:
            read[name] = value
    return read
