"""Entry point of `stts-hf`."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from stts_hf.cli.errors import CommandError, refused, shortage
from stts_hf.versions import __version__, check_versions
from stts_hf.wording import did_you_mean

# Each in the module of its name, which is imported when it is asked for: `add_arguments(parser)`, and
# `execute(arguments)`, which returns the exit status unless it is 0, or raises `CommandError` for a user error.
COMMANDS = {
    "run": "answer a question about a video and draw the dropped tokens",
    "explain": "say why an answer is what it is: dropped, not sampled or seen, which blocks turn it, and what mends it",
    "predict": "answer prompts about many videos; a stopped run continues where it ended",
    "calibrate": "find the score threshold that keeps a given share of your videos' tokens",
    "visualize": "compare what selection methods keep of a video: contact sheets, dimmed videos, a web page",
    "demo": "serve a web page for asking about videos that shows what the model looked at",
    "convert": "make an STTS checkpoint of a stock Molmo2 or Qwen-VL model, or of an original STTS training checkpoint",
    "doctor": "check a checkpoint folder and report each problem with its remedy",
    "push": "push a checkpoint folder to the Hugging Face Hub, in one commit",
    "bench": "measure speed, FLOPs and memory beside the stock model",
    "train": "fine-tune from a YAML file; on several GPUs: accelerate launch -m stts_hf.cli.main train CONFIG",
    "eval": "score a checkpoint on the questions of a JSONL file, by question type",
}
# Remedies for a lack of memory.
_SMALLER = "fewer --num-frames, a higher --pruning-ratio or --dtype bfloat16"
LESS_MEMORY = {
    **dict.fromkeys(("run", "explain", "visualize"), _SMALLER),
    "predict": f"a smaller --batch-size, {_SMALLER}",
    "calibrate": "fewer --num-frames or --dtype bfloat16",
    "eval": f"a smaller --batch-size, {_SMALLER}",
    "train": "a smaller `per_device_train_batch_size` (with more `gradient_accumulation_steps`), "
    "`gradient_checkpointing: true`, fewer `num_frames` or `use_peft: true`; --resume goes on from the last whole "
    "checkpoint",
}


class Parser(argparse.ArgumentParser):
    """Says what a misspelt command, option or value may have meant."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        # Else argparse asks `shutil`, whose import takes as long as all of our options.
        return argparse.HelpFormatter(self.prog, width=columns() - 2)

    def parse_args(self, *arguments: Any) -> argparse.Namespace:  # type: ignore[override]  # one signature of two
        found, unknown = self.parse_known_args(*arguments)
        if unknown:
            chosen: Any = next(action for action in self._actions if action.dest == "command")
            command = chosen.choices[found.command]
            options = [option for action in command._actions for option in action.option_strings]  # noqa: SLF001
            advice = did_you_mean(unknown[0].partition("=")[0], options)
            command.error(" ".join(["unrecognized arguments:", *unknown]) + (advice and f". {advice}"))
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            advice = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + (advice and f". {advice}")) from None


def columns() -> int:
    """As `shutil.get_terminal_size().columns`."""
    with contextlib.suppress(ValueError, OSError):
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns) or 80
    return 80


def build_parser(*names: str, with_arguments: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of these commands (default: of all). Each command takes a millisecond, its arguments more."""
    parser = Parser(
        prog="stts-hf", description="Video language models that drop redundant video tokens inside the ViT (STTS)."
    )
    parser.add_argument("--version", action="version", version=f"stts-hf {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in names or COMMANDS:
        command = commands.add_parser(name, help=COMMANDS[name], description=COMMANDS[name])
        if with_arguments:
            importlib.import_module(f"stts_hf.cli.{name}").add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command and returns its exit status: 0 for success; 1 if `doctor` found problems, `predict`, `eval` or
    `calibrate` could not read some rows, or `bench` could measure nothing; 2 for a user error or a lack of disk space,
    permissions or memory (one line on stderr); 130 if interrupted; 143 if SIGTERM ended `train`, which has then saved.
    Any other exception is a bug and keeps its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    known = [word for word in words[:1] if word in COMMANDS]
    parser = build_parser(*known, with_arguments=bool(known))
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        with refused("", ImportError):
            check_versions()
        return importlib.import_module(f"stts_hf.cli.{arguments.command}").execute(arguments) or 0
    except KeyboardInterrupt:
        print(f"stts-hf {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        reason = str(error) if isinstance(error, CommandError) else shortage(error, LESS_MEMORY.get(arguments.command))
        if reason is None:
            raise
        print(f"stts-hf {arguments.command}: error: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
