"""`stts-hf train config.yaml`: fine-tunes as a configuration file says; also under `accelerate launch`."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.progress import keep_bars_out_of_logs
from stts_hf.shortages import is_disk_full, is_forbidden
from stts_hf.versions import check_versions

if TYPE_CHECKING:
    from stts_hf.training.config import TrainConfig

HELP = "fine-tune from a YAML file; on several GPUs: accelerate launch -m stts_hf.cli.main train CONFIG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; see examples/configs and docs/training.md"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="resume from CHECKPOINT (default: the last complete checkpoint in the output folder)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration and all rows and print the plan, without loading weights",
    )
    parser.add_argument(
        "overrides",
        metavar="--SETTING VALUE",
        nargs=argparse.REMAINDER,
        help="replaces a value of the file, such as --max_steps 10; `stts-hf train CONFIG --help` lists all settings",
    )


def _take_own_options(arguments: argparse.Namespace) -> list[str]:
    """Sets `resume` and `dry_run` where they stand behind CONFIG; returns the other words there."""
    words = list(arguments.overrides)
    if "--dry-run" in words:
        words.remove("--dry-run")
        arguments.dry_run = True
    if "--resume" in words:
        place = words.index("--resume")
        named = len(words) > place + 1 and not words[place + 1].startswith("--")
        arguments.resume = words[place + 1] if named else True
        del words[place : place + 1 + named]
    return words


def execute(arguments: argparse.Namespace) -> int:
    """Returns the exit status; raises `CommandError` for what is wrong in the configuration or the rows."""
    overrides = _take_own_options(arguments)
    if arguments.config is None:
        if isinstance(arguments.resume, str):
            raise CommandError(
                f"--resume took {arguments.resume!r} for the checkpoint, and no CONFIG is left. Write the file first: "
                "stts-hf train CONFIG --resume"
            )
        raise CommandError("CONFIG is missing: a YAML file, such as those in examples/configs")
    try:
        check_versions("train")
    except ImportError as error:
        needs = f"{' '.join(str(error).split())} Training needs more packages: pip install 'stts-hf[train]'"
        raise CommandError(needs) from error
    from stts_hf.training.config import ConfigError, load_config

    keep_bars_out_of_logs()
    try:
        config = load_config(arguments.config, overrides, need_gpu=not arguments.dry_run)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    output = str(config.training.output_dir)
    with _command_errors(output):
        return _run(config, arguments, output)


def _run(config: "TrainConfig", arguments: argparse.Namespace, output: str) -> int:
    from accelerate import PartialState

    from stts_hf.training.run import dry_run, train
    from stts_hf.training.termination import TrainingTerminated

    if arguments.dry_run:
        print(dry_run(config))
        return 0
    try:
        trainer = train(config, arguments.resume)
    except TrainingTerminated as error:
        print(error, file=sys.stderr)
        PartialState().destroy_process_group()  # threads of gloo may abort a process that ends after another
        return 128 + signal.SIGTERM  # what a shell reports for a process that SIGTERM ended
    if trainer.is_world_process_zero():
        print(f"Saved to {output}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _command_errors(output: str) -> Iterator[None]:
    """Raises `CommandError` for what a user can mend. output: the run's folder."""
    from stts_hf.checkpoints.push import PushRefused
    from stts_hf.data.rows import RowError
    from stts_hf.training.config import ConfigError

    try:
        yield
    except RowError as error:  # out of a data loader's worker, with its traceback in front
        text = str(error)
        raise CommandError(text.rpartition("RowError: ")[2] if "Original Traceback" in text else text) from error
    except PushRefused as error:
        raise CommandError(f"Saved to {output}, but not pushed: {error}") from error
    except (ConfigError, FloatingPointError) as error:
        raise CommandError(str(error)) from error
    except Exception as error:
        if is_disk_full(error):
            trouble = f"No space is left on the disk of {output!r}: {one_line(error)}. Free some"
        elif is_forbidden(error):
            trouble = f"{one_line(error)}. Allow that (output_dir is {output!r})"
        else:
            raise
        raise CommandError(
            f"{trouble}, then continue from the last whole checkpoint with --resume, or "
            "where there is none, start again."
        ) from error
