"""Entry point of `stts-hf`."""

import argparse
import sys
from collections.abc import Sequence

from stts_hf.cli import bench, convert, demo, doctor, eval, predict, push, run, train, visualize
from stts_hf.cli.errors import CommandError, shortage
from stts_hf.versions import __version__, check_versions

COMMANDS = {
    "run": run,
    "predict": predict,
    "visualize": visualize,
    "demo": demo,
    "convert": convert,
    "doctor": doctor,
    "push": push,
    "bench": bench,
    "train": train,
    "eval": eval,
}
# Remedies for a lack of memory.
_SMALLER = "fewer --num-frames, a higher --pruning-ratio or --dtype bfloat16"
LESS_MEMORY = {
    "run": _SMALLER,
    "visualize": _SMALLER,
    "predict": f"a smaller --batch-size, {_SMALLER}",
    "eval": f"a smaller --batch-size, {_SMALLER}",
    "train": "a smaller `per_device_train_batch_size` (with more `gradient_accumulation_steps`), "
    "`gradient_checkpointing: true`, fewer `num_frames` or `use_peft: true`; --resume goes on from the last whole "
    "checkpoint",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all sub-commands."""
    parser = argparse.ArgumentParser(
        prog="stts-hf", description="Video language models that drop redundant video tokens inside the ViT (STTS)."
    )
    parser.add_argument("--version", action="version", version=f"stts-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command and returns its exit status: 0 for success; 1 if `doctor` found problems, `predict` or `eval` could
    not answer some rows, or `bench` could measure nothing; 2 for a user error or a lack of disk space, permissions or
    memory (one line on stderr); 130 if interrupted; 143 if SIGTERM ended `train`, which has then saved. Any other
    exception is a bug and keeps its traceback.
    """
    arguments = build_parser().parse_args(argv)
    try:
        check_versions()
    except ImportError as error:
        print(f"stts-hf {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    try:
        status = COMMANDS[arguments.command].execute(arguments)
    except CommandError as error:
        print(f"stts-hf {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stts-hf {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        reason = shortage(error, LESS_MEMORY.get(arguments.command))
        if reason is None:
            raise
        print(f"stts-hf {arguments.command}: error: {reason}", file=sys.stderr)
        return 2
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
