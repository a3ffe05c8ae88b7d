"""What tests of saving, loading and pushing share: the tiny checkpoint, a prompt about a clip, and what it gives."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from tests.clips import write_clip

TINY = Path(__file__).resolve().parent.parent / "hub_configs" / "stts-tiny"
AUTO_CLASSES = {
    "AutoConfig": "configuration_stts.STTSConfig",
    "AutoModel": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForMultimodalLM": "modeling_stts.STTSForConditionalGeneration",
    "AutoProcessor": "processing_stts.STTSProcessor",
    "AutoVideoProcessor": "video_processing_stts.STTSVideoProcessor",
}
MESSAGES_CODE = """
def messages(clip):
    return [{"role": "user", "content": [{"type": "video", "video": clip}, {"type": "text", "text": "What moves?"}]}]
"""


def messages(clip: Path | str) -> list[dict[str, Any]]:
    """A conversation about a clip."""
    return [
        {"role": "user", "content": [{"type": "video", "video": str(clip)}, {"type": "text", "text": "What moves?"}]}
    ]


def write_small_clip(folder: Path) -> Path:
    """A clip of 2 seconds, which is shown as 5 frames."""
    return write_clip(folder / "clip.mp4", 20, fps=10)


def load_tiny(folder: Path | str = TINY, **options: Any) -> STTSForConditionalGeneration:
    """The model of a checkpoint folder, through the installed package."""
    return STTSForConditionalGeneration.from_pretrained(folder, **options).eval()


def load_talkative() -> STTSForConditionalGeneration:
    """The tiny model with a random text model: what it writes says nothing, but differs from prompt to prompt."""
    model = load_tiny()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in [*model.model.language_model.parameters(), model.lm_head.weight]:
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
    return model


def prepare(clip: Path | str, folder: Path | str = TINY) -> dict[str, Any]:
    """Inputs for the conversation about a clip."""
    processor: Any = STTSProcessor.from_pretrained(folder)
    return dict(
        processor.apply_chat_template(
            messages(clip), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits (B, L', vocabulary) with half of the video dropped."""
    return model(**inputs, pruning_ratio=0.5).logits


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    """Name to SHA-256 of the files that match."""
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
