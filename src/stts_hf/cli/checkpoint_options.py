"""The checkpoint that a command runs, as its options say."""

import argparse
import os
from pathlib import Path
from typing import Any

from stts_hf.checkpoints import loading
from stts_hf.cli.errors import CommandError, of_option
from stts_hf.cli.progress import note

TINY = Path("hub_configs") / "stts-tiny"


def find_checkpoint(checkpoint: str | None) -> str:
    """Returns the checkpoint asked for, or the tiny one where the command runs from a source checkout."""
    if checkpoint is not None:
        with of_option():
            return loading.check_checkpoint(checkpoint)
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / TINY / "config.json").is_file():
            folder = root / TINY
            note("No --checkpoint: using stts-tiny, which knows a few shapes, colours and letters, and nothing else")
            return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    raise CommandError(
        f"--checkpoint is needed: the folder or Hub name of an STTS checkpoint. (Only a source checkout has {TINY}.)"
    )


def load_processor(checkpoint: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Returns configuration and processor."""
    with of_option():
        return loading.load_config_and_processor(checkpoint, revision=arguments.revision, selector=arguments.selector)


def load_model(checkpoint: str, config: Any, device: Any, arguments: argparse.Namespace) -> Any:
    """Returns the model."""
    with of_option():
        return loading.load_model(checkpoint, config, device, revision=arguments.revision, dtype=arguments.dtype)
