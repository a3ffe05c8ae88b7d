"""The checkpoint that a command runs: found, and loaded by its own code."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.files import dangling_links
from stts_hf.cli.errors import CommandError, one_line
from stts_hf.cli.progress import note

TINY = Path("hub_configs") / "stts-tiny"
MOLMO2 = "molmo2"  # the model type of stock checkpoints


def find_checkpoint(checkpoint: str | None) -> str:
    """Returns the checkpoint asked for, or the tiny one where the command runs from a source checkout."""
    if checkpoint is not None:
        looks_like_a_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        path = Path(checkpoint).expanduser()
        problem = None
        if not path.is_dir():
            if looks_like_a_path or path.exists():
                problem = "is not a folder; pass a checkpoint's folder or user/name"
        elif dangling := next(dangling_links(path), None):
            problem = f"is not whole: {dangling}"
        elif not any(path.glob("*.safetensors")):
            problem = "holds no weights (*.safetensors)"
        if problem is not None:
            raise CommandError(f"--checkpoint {checkpoint} {problem}")
        return str(path) if path.is_dir() else checkpoint
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / TINY / "config.json").is_file():
            folder = root / TINY
            note("No --checkpoint: using stts-tiny, which knows nothing about videos but drops what stands still")
            return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    raise CommandError(
        f"--checkpoint is needed: the folder or Hub name of an STTS checkpoint. (Only a source checkout has {TINY}.)"
    )


def load_processor(checkpoint: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Returns configuration and processor, by the checkpoint's own code; of a stock Molmo2 model, by the package's."""
    from transformers import AutoConfig, AutoProcessor, PreTrainedConfig

    options: dict[str, Any] = {"revision": arguments.revision or "main"}
    with loading(checkpoint):
        kind = PreTrainedConfig.get_config_dict(checkpoint, **options)[0].get("model_type")
        if kind == MOLMO2 and arguments.selector in (None, "scorer"):
            raise CommandError(
                f"--checkpoint {checkpoint} is a stock Molmo2 model, which has no trained scorer: pass --selector "
                "cosine, which needs none, or make an STTS checkpoint of it with stts-hf convert and train that"
            )
        if kind == MOLMO2:
            from stts_hf.modeling.configuration_stts import STTSConfig
            from stts_hf.modeling.processing_stts import STTSProcessor

            config: Any = STTSConfig.from_pretrained(checkpoint, **options)
            processor: Any = STTSProcessor.from_pretrained(checkpoint, **options)
        elif str(kind).startswith("stts"):
            config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True, **options)
            processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True, **options)
        else:
            raise CommandError(f"--checkpoint {checkpoint} is a {kind!r} model, but must be an STTS checkpoint")
        if arguments.selector is not None:
            config.vision_config.selector = arguments.selector
        return config, processor


def load_model(checkpoint: str, config: Any, device: Any, arguments: argparse.Namespace) -> Any:
    """Returns the model, by the code that `config` is of."""
    from transformers import AutoModelForMultimodalLM

    from stts_hf.modeling.configuration_stts import STTSConfig
    from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration

    options = {"config": config, "dtype": arguments.dtype, "revision": arguments.revision or "main"}
    if getattr(arguments, "attn_implementation", None) is not None:
        options["attn_implementation"] = arguments.attn_implementation
    with loading(checkpoint):
        if type(config) is STTSConfig:
            model: Any = STTSForConditionalGeneration.from_pretrained(checkpoint, **options)
        else:
            model = AutoModelForMultimodalLM.from_pretrained(checkpoint, trust_remote_code=True, **options)
    return model.to(device).eval()


@contextlib.contextmanager
def loading(checkpoint: str) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise CommandError(f"--checkpoint {checkpoint} cannot be loaded: {one_line(error)}") from error
