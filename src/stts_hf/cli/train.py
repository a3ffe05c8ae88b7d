"""`stts-hf train config.yaml`: fine-tunes from a configuration file; also under `accelerate launch`."""

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stts_hf.cli.checkpoint_options import use_one_thread
from stts_hf.cli.errors import CommandError, need_extras
from stts_hf.cli.progress import keep_bars_out_of_logs, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file; see examples/configs, docs/training.md")
    resume = "resume from CHECKPOINT (default: the last complete checkpoint in the output folder)"
    parser.add_argument("--resume", nargs="?", const=True, default=False, metavar="CHECKPOINT", help=resume)
    plan = "check the configuration and all rows and print the plan, without loading weights"
    parser.add_argument("--dry-run", action="store_true", help=plan)
    others = "replaces a value of the file, such as --max_steps 10; `stts-hf train CONFIG --help` lists all settings"
    parser.add_argument("overrides", metavar="--SETTING VALUE", nargs=argparse.REMAINDER, help=others)


def _take_options(arguments: argparse.Namespace) -> list[str]:
    """Sets `resume` and `dry_run` if they come after CONFIG; returns the other words."""
    words = list(arguments.overrides)
    if "--dry-run" in words:
        words.remove("--dry-run")
        arguments.dry_run = True
    if "--resume" in words:  # argparse would take `--learning_rates={scorer: 1e-3}`, which has a space, for its value
        index = words.index("--resume")
        is_named = len(words) > index + 1 and not words[index + 1].startswith("--")
        arguments.resume = words[index + 1] if is_named else True
        del words[index : index + 1 + is_named]
    return words


def execute(arguments: argparse.Namespace) -> int:
    """Returns the exit status; raises `CommandError` for mistakes in the configuration or the rows."""
    overrides = _take_options(arguments)
    if arguments.config is None:
        took = f" (--resume took {arguments.resume!r})" if isinstance(arguments.resume, str) else ""
        raise CommandError(f"CONFIG is missing{took}: stts-hf train CONFIG --resume; see examples/configs")
    if not os.path.exists(arguments.config):
        raise CommandError(f"CONFIG {arguments.config} cannot be read: there is no such file; see examples/configs")
    need_extras("Training needs more packages", "train")
    from accelerate import PartialState

    from stts_hf.data.rows import RowError
    from stts_hf.training.config import ConfigError, load_config
    from stts_hf.training.run import dry_run, train
    from stts_hf.training.termination import TrainingTerminated

    keep_bars_out_of_logs()
    try:
        config = load_config(arguments.config, overrides, need_gpu=not arguments.dry_run)
        if arguments.dry_run:
            print(dry_run(config))
            return 0
        on_cpu = config.training.device.type == "cpu"  # a model comes onto a GPU later
        given: dict[str, Any] = {"started": use_one_thread} if on_cpu else {}
        trainer = train(config, arguments.resume, **given, begun=_drawing)
    except TrainingTerminated as error:
        note(str(error))
        PartialState().destroy_process_group()  # gloo's threads may abort a process that ends after another
        return 128 + signal.SIGTERM  # as shells report a process that SIGTERM ended
    except RowError as error:  # a data loader's worker puts its traceback before the message
        text = str(error)
        raise CommandError(text.rpartition("RowError: ")[2] if "Original Traceback" in text else text) from error
    except (ConfigError, FloatingPointError) as error:
        raise CommandError(str(error)) from error
    if trainer.is_world_process_zero():
        note(f"Saved to {trainer.args.output_dir}")
    return 0


def _drawing(trainer: Any) -> Callable[[Path], None]:
    """What draws the run's results, on one process; a line that says why not, without the packages for it."""
    if trainer.is_world_process_zero():
        try:
            need_extras("results.png needs one more", "visualize")
            from stts_hf.visualize.results import Results

            return Results(trainer).draw
        except (CommandError, ImportError) as error:
            note(f"results.png is not drawn: {error}")
    return lambda folder: None
