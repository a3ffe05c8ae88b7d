"""`stts-hf train config.yaml`: fine-tunes as a configuration file says; also under `accelerate launch`."""

import argparse
import os
import sys

from stts_hf.cli.errors import CommandError

HELP = "fine-tune as a YAML file says; for several GPUs: accelerate launch -m stts_hf.cli.main train CONFIG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; see examples/configs and docs/training.md"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY.PATH=VALUE",
        help="in place of what the file says, such as training.max_steps=10; may be repeated",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="go on from the last whole checkpoint in the output folder, or from CHECKPOINT",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration and all rows, print the plan, load no weights"
    )


def execute(arguments: argparse.Namespace) -> None:
    """Runs the command; raises `CommandError` for what is wrong in the configuration or the rows."""
    if arguments.config is None:
        if isinstance(arguments.resume, str):
            raise CommandError(
                f"--resume took {arguments.resume!r} for the checkpoint, and no CONFIG is left. Write the file first: "
                "stts-hf train CONFIG --resume"
            )
        raise CommandError("CONFIG is missing: a YAML file, such as those in examples/configs")
    try:
        import accelerate  # noqa: F401
        import datasets  # noqa: F401
    except ImportError as error:
        raise CommandError(f"{error}. Training needs more packages: pip install 'stts-hf[train]'") from error
    from stts_hf.checkpoints.push import PushRefused
    from stts_hf.data.rows import RowError
    from stts_hf.training.config import load_config
    from stts_hf.training.strict_yaml import ConfigError

    try:
        config = load_config(arguments.config, arguments.overrides)
        from stts_hf.training.run import dry_run, train

        if arguments.dry_run:
            print(dry_run(config))
            return
        trainer = train(config, arguments.resume)
    except RowError as error:  # out of a data loader's worker, with its traceback in front
        text = str(error)
        raise CommandError(text.rpartition("RowError: ")[2] if "Original Traceback" in text else text) from error
    except PushRefused as error:
        raise CommandError(f"Saved to {os.fspath(config.training['output_dir'])}, but not pushed: {error}") from error
    except (ConfigError, FloatingPointError) as error:
        raise CommandError(str(error)) from error
    if trainer.is_world_process_zero():
        print(f"Saved to {os.fspath(config.training['output_dir'])}", file=sys.stderr)
