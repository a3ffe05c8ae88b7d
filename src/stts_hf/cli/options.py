"""Values of options that several commands take."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from stts_hf.checkpoints import loading
from stts_hf.cli.errors import CommandError, of_option
from stts_hf.selectors import SELECTORS


def count(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, but must be at least 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"is {text}, but must be at least 0")
    return int(text)


def share(text: str) -> float:
    """A share that can be dropped."""
    if not 0 <= float(text) <= 1:  # NaN fails too
        raise argparse.ArgumentTypeError(f"is {text}, but must be a share from 0 (drop nothing) to 1 (drop all)")
    return float(text)


def positive(text: str) -> float:
    """A number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, but must be above 0")
    return float(text)


def add_model_options(
    parser: argparse.ArgumentParser, max_new_tokens: int, *, selector: bool = True, urls: bool = True
) -> None:
    """Adds the model, its frames, device and answer length; and its selector and permission to download."""
    parser.add_argument(
        "--checkpoint",
        metavar="PATH_OR_REPO",
        help="folder or Hub repository of an STTS checkpoint; its code is not executed. "
        "Default: stts-tiny of a source checkout, a demo model that knows only a few shapes, colours and letters",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--pruning-ratio", type=share, metavar="K", help="share of video tokens to drop, 0 to 1")
    parser.add_argument(
        "--num-frames", type=count, metavar="N", help="maximum number of frames (default: checkpoint's)"
    )
    parser.add_argument(
        "--test-time-scaling",
        action="store_true",
        help="sample 1 / (1 - K) times as many frames, for the same number of tokens",
    )
    parser.add_argument("--device", default="auto", help="device: auto (default), cpu, cuda, cuda:1, mps, ...")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the model (default: auto)",
    )
    length = f"maximum new tokens per answer (default: {max_new_tokens})"
    parser.add_argument("--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help=length)
    if selector:
        parser.add_argument("--selector", choices=SELECTORS, help="selection method (default: checkpoint's)")
    if urls:
        parser.add_argument("--allow-urls", action="store_true", help="allow http(s) addresses as videos")


def processing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the processor that a command's options stand for."""
    options = {name: getattr(arguments, name, None) for name in ("num_frames", "max_fps", "test_time_scaling")}
    return {name: value for name, value in options.items() if value not in (None, False)}


def check_scaling(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` where no number of frames is enough."""
    if arguments.test_time_scaling and arguments.pruning_ratio == 1:
        raise CommandError("--test-time-scaling needs a --pruning-ratio below 1: at 1 no number of frames is enough")


def check_writable(option: str, folder: Path) -> None:
    """Raises `CommandError` where a folder, which need not exist yet, could not be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CommandError(f"{option} {folder} must be a folder that can be written, but {there} is not")


def choose_device(name: str) -> Any:
    """Returns the `torch.device`, the fastest there is for "auto". Raises `CommandError` for one that is not there."""
    with of_option():
        return loading.choose_device(name)
