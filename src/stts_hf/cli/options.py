"""Values of options that several commands take."""

import argparse
import os
from pathlib import Path
from typing import Any

from stts_hf.cli.errors import CommandError, one_line


def count(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, but must be at least 1")
    return int(text)


def share(text: str) -> float:
    """A share that can be dropped."""
    if not 0 <= float(text) <= 1:  # NaN fails too
        raise argparse.ArgumentTypeError(f"is {text}, but must be a share from 0 (drop nothing) to 1 (drop all)")
    return float(text)


def check_writable(option: str, folder: Path) -> None:
    """Raises `CommandError` where a folder, which need not exist yet, could not be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CommandError(f"{option} {folder} must be a folder that can be written, but {there} is not")


def choose_device(name: str) -> Any:
    """Returns the `torch.device`, the fastest there is for "auto". Raises `CommandError` for one that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {name} cannot be used here: {one_line(error, 120)}") from None
    if device.type == "meta":
        raise CommandError("--device meta cannot be used here: it has shapes, but no numbers")
    return device
