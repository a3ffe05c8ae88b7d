"""Options of several commands, and checks of their values."""

import argparse
import math
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stts_hf.cli.errors import CommandError
from stts_hf.selectors import SELECTORS
from stts_hf.wording import share


def _number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], needs: str) -> Callable[[str], Any]:

    def number(text: str) -> Any:
        if not accepts(kind(text)):  # NaN fails too
            raise argparse.ArgumentTypeError(f"is {text}, but must be {needs}")
        return kind(text)

    return number


count = _number(int, lambda value: value >= 1, "at least 1")
natural = _number(int, lambda value: value >= 0, "at least 0")
positive = _number(float, lambda value: 0 < value < math.inf, "above 0")
seconds = _number(float, lambda value: 0 <= value < math.inf, "at least 0")


def device_name(text: str) -> str:
    """A device as PyTorch names it; a CUDA GPU is refused if there is none."""
    from stts_hf.checkpoints.loading import check_device

    try:
        check_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# As in `modeling/video_reading_stts.py`, which imports PyTorch.
FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,m4v,h261,h263,h264,hevc,vvc,av1,obu,ivf,flv,live_flv,asf,ogg,rm,nut,mxf,"
    "gxf,wtv,dv,dhav,nsv,nuv,pva,ty,vc1,vc1test,dirac,dnxhd,cavsvideo,avs2,avs3,mjpeg,mjpeg_2000,smjpeg,yuv4mpegpipe,"
    "bink,smk,roq,flic,swf,cine,gif,apng,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,jpegxl_pipe,j2k_pipe"
)


def is_url(source: str) -> bool:
    """As in `modeling/video_reading_stts.py`."""
    return source.lower().startswith(("http://", "https://"))


# How the value is read: its type or its choices, None for a flag; then default, metavar, and help.
Option = tuple[Callable[[str], Any] | Collection[str] | None, Any, str | None, str]
OPTIONS: dict[str, Option] = {
    "checkpoint": (
        str,
        None,
        "PATH_OR_REPO",
        "folder or Hub repository of an STTS checkpoint; its code is not executed. "
        "Default: stts-tiny of a source checkout, a demo model that knows only a few shapes, colours and letters",
    ),
    "pruning_ratio": (share, None, "K", "share of video tokens to drop, 0 to 1"),
    "score_threshold": (float, None, "S", "keep the blocks that score at least S, in place of a ratio; see calibrate"),
    "min_pruning_ratio": (share, None, "K", "minimum share of a video that a threshold drops"),
    "max_pruning_ratio": (share, None, "K", "maximum share of a video that a threshold drops"),
    "video_token_budget": (count, None, "N", "maximum number of video tokens per question"),
    "test_time_scaling": (
        None,
        False,
        None,
        "sample 1 / (1 - K) times as many frames, for the same number of tokens, or until the budget is full",
    ),
    "max_new_tokens": (count, 64, "N", "maximum new tokens per answer"),
    "revision": (str, None, None, "branch, tag or commit of a Hub repository"),
    "num_frames": (count, None, "N", "maximum frames (default: checkpoint's)"),
    "max_fps": (positive, None, "R", "maximum frame rate (default: checkpoint's)"),
    "device": (device_name, "auto", None, "device: auto, cpu, cuda, cuda:1, mps, ..."),
    "dtype": (("auto", "float32", "bfloat16", "float16"), "auto", None, "dtype of the model"),
    "selector": (SELECTORS, None, None, "selection method (default: checkpoint's)"),
    "allow_urls": (None, False, None, "allow http(s) addresses as videos"),
    "batch_size": (count, 8, "N", "questions per batch"),
    "workers": (natural, None, "N", "processes that decode ahead; 0: one thread (default: one per core, at most 4)"),
    "decode_timeout": (positive, 600, "S", "seconds allowed for reading the videos and images of one row"),
}
# What a call may say of how many blocks stay, as in `modeling/budget_stts.py`, which imports PyTorch.
KEEP = ("pruning_ratio", "score_threshold", "min_pruning_ratio", "max_pruning_ratio", "video_token_budget")
PROCESSING = ("num_frames", "max_fps", "test_time_scaling")
RUNNING = ("revision", "num_frames", "max_fps", "device", "dtype")
MODEL = ("checkpoint", *KEEP, "test_time_scaling", "max_new_tokens", *RUNNING)
DECODING = ("workers", "decode_timeout")


def add_options(
    parser: argparse.ArgumentParser, *names: str, table: Mapping[str, Option] = OPTIONS, **defaults: Any
) -> None:
    """Adds some options of a table, or all. defaults: in place of the table's."""
    for name in names or table:
        kind, default, metavar, words = table[name]
        default = defaults.get(name, default)
        given: dict[str, Any] = {"help": f"{words} (default: {default})" if default else words}
        if kind is None:
            given["action"] = "store_true"
        else:
            given |= {"type" if callable(kind) else "choices": kind, "default": default, "metavar": metavar}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)


def processing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the processor's options from a command's arguments."""
    options = {name: getattr(arguments, name, None) for name in PROCESSING}
    return {name: value for name, value in options.items() if value not in (None, False)}


def check_writable(option: str, folder: Path) -> None:
    """Raises `CommandError` if a folder, which need not exist, cannot be created or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CommandError(f"{option} {folder} cannot be written: {there} is not a writable folder; name another")


def check_output(path: Path, inputs: Iterable[str | Path], endings: Sequence[str], option: str = "--output") -> None:
    """Raises `CommandError` if the file of an option cannot be written, is an input, or has another ending."""
    if path.suffix.lower() not in endings:
        raise CommandError(f"{option} {path} must be a file that ends in {' or '.join(endings)}")
    try:
        if not stat.S_ISREG(path.stat().st_mode) or not os.access(path, os.W_OK):
            raise CommandError(f"{option} {path} is there already and cannot be written over; name another file")
        if any(os.path.exists(given) and os.path.samefile(given, path) for given in inputs):
            raise CommandError(f"{option} would write to {path}, which is an input; name another")
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, a loop of links
        raise CommandError(f"{option} {path} cannot be used: {error.strerror}; name another file") from error
    folder = Path(os.path.realpath(path)).parent
    if not folder.exists():
        raise CommandError(f"{option} {path} lies in a folder that does not exist; create {folder} first")
    check_writable(option, folder)
