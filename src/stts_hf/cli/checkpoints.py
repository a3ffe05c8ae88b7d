"""The checkpoint that a command runs: found, and loaded by its own code."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.progress import note

TINY = Path("hub_configs") / "stts-tiny"


def find_checkpoint(checkpoint: str | None) -> str:
    """Returns the checkpoint asked for, or the tiny one where the command runs from a source checkout."""
    if checkpoint is not None:
        looks_like_a_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        path = Path(checkpoint).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise CommandError(f"--checkpoint {checkpoint} holds no config.json, so it is not a checkpoint")
            if not any(path.glob("*.safetensors")):
                raise CommandError(f"--checkpoint {checkpoint} holds no weights (*.safetensors)")
            return str(path)
        if looks_like_a_path or path.exists():
            raise CommandError(f"--checkpoint {checkpoint} is not a folder; pass a checkpoint's folder or user/name")
        return checkpoint
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / TINY / "config.json").is_file():
            folder = root / TINY
            note("No --checkpoint: using stts-tiny, which knows nothing about videos but drops what stands still")
            return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    raise CommandError(
        f"--checkpoint is needed: the folder or Hub name of an STTS checkpoint. (Only a source checkout has {TINY}.)"
    )


def load_processor(checkpoint: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Returns configuration and processor, by the checkpoint's own code."""
    from transformers import AutoConfig, AutoProcessor

    with loading(checkpoint):
        config = AutoConfig.from_pretrained(checkpoint, **remote_code(arguments))
        if not hasattr(config, "vision_config") or not hasattr(config.vision_config, "pruning_ratio"):
            raise CommandError(
                f"--checkpoint {checkpoint} is a {config.model_type!r} model, but must be an STTS checkpoint"
            )
        if arguments.selector is not None:
            config.vision_config.selector = arguments.selector
        return config, AutoProcessor.from_pretrained(checkpoint, **remote_code(arguments))


def load_model(checkpoint: str, config: Any, device: Any, arguments: argparse.Namespace) -> Any:
    """Returns the model, by the checkpoint's own code."""
    from transformers import AutoModelForMultimodalLM

    with loading(checkpoint):
        model = AutoModelForMultimodalLM.from_pretrained(
            checkpoint, config=config, dtype=arguments.dtype, **remote_code(arguments)
        )
    return model.to(device).eval()


def remote_code(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"trust_remote_code": True, "revision": arguments.revision or "main"}


@contextlib.contextmanager
def loading(checkpoint: str) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise CommandError(f"--checkpoint {checkpoint} cannot be loaded: {one_line(error)}") from error
