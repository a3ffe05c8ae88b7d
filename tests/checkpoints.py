"""What tests of saving, loading and pushing share: the tiny checkpoints, a prompt about a clip, and what it gives."""

import hashlib
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM, LogitsProcessor

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.model_parts import LANGUAGE_MODEL, module_of
from tests.clips import write_clip

TINY = Path(__file__).resolve().parent.parent / "hub_configs" / "stts-tiny"
TINIES = {
    "molmo2": TINY,
    "qwen3_vl": TINY.with_name("stts-qwen3-vl-tiny"),
    "qwen2_5_vl": TINY.with_name("stts-qwen2-5-vl-tiny"),
}
# Those of backbones whose tower and hooks are another one's, and which take fewer tests.
ALL_TINIES = TINIES | {
    "qwen3_vl_moe": TINY.with_name("stts-qwen3-vl-moe-tiny"),
    "smolvlm": TINY.with_name("stts-smolvlm-tiny"),
    "qwen3_5": TINY.with_name("stts-qwen3-5-tiny"),
    "qwen3_5_moe": TINY.with_name("stts-qwen3-5-moe-tiny"),
}
# Names for tests that take seconds each: of backbones whose tower is the same code, one every day.
QWENS = ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)]
DAILY = ["molmo2", *QWENS]
needs_num2words = pytest.mark.skipif(find_spec("num2words") is None, reason="SmolVLM2's processor needs num2words")
SMOLVLM = pytest.param("smolvlm", marks=[pytest.mark.slow, needs_num2words])
# Qwen3.5-MoE has experts and states.
OTHERS = [
    SMOLVLM,
    pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.spare) for name in ("qwen3_vl_moe", "qwen3_5")),
]
EVERY = [*DAILY, *OTHERS]
_VISION = json.loads((TINY / "config.json").read_text())["vision_config"]
GRID = tuple(
    side // _VISION["patch_size"] // window
    for side, window in zip(_VISION["image_size"], _VISION["pooling_size"], strict=True)
)
BLOCKS = GRID[0] * GRID[1]  # of a frame that the tiny checkpoint is shown


def messages(clip: Path | str) -> list[dict[str, Any]]:
    """A conversation about a clip."""
    return [
        {"role": "user", "content": [{"type": "video", "video": str(clip)}, {"type": "text", "text": "What moves?"}]}
    ]


def write_small_clip(folder: Path) -> Path:
    """A clip of a second, which is shown as 5 frames."""
    return write_clip(folder / "clip.mp4", 20, fps=20)


def load_tiny(folder: Path | str = TINY, **options: Any) -> STTSForConditionalGeneration:
    """The model of a checkpoint folder, through the installed package."""
    return STTSForConditionalGeneration.from_pretrained(folder, **options).eval()


def load_talkative(folder: Path = TINY) -> Any:
    """A tiny model with a random text model: what it writes says nothing, but differs from prompt to prompt."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    seed = 1 if folder.name == "stts-qwen3-vl-moe-tiny" else 0  # with 0, that one says the same of everything
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if model.lm_head.weight is model.get_input_embeddings().weight:  # then it would repeat itself
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        for weight in [*module_of(model, LANGUAGE_MODEL).parameters(), model.lm_head.weight]:
            if weight.dim() > 1:  # of experts, a matrix each
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return model


class Recorder(LogitsProcessor):
    """Keeps the logits of each step of `generate`, (B, vocabulary)."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.steps.append(scores.float())
        return scores

    def logits(self, steps: int) -> torch.Tensor:
        """(rows, steps, vocabulary) of all batches, each of so many steps."""
        batches = [self.steps[start : start + steps] for start in range(0, len(self.steps), steps)]
        return torch.cat([torch.stack(batch, dim=1) for batch in batches])


ANSWER = "The red ring moves"


def load_of_one_answer() -> STTSForConditionalGeneration:
    """The tiny model with a text model that says `ANSWER`, whatever it is asked and shown."""
    model = load_talkative()
    processor: Any = STTSProcessor.from_pretrained(TINY)
    tokenizer = processor.tokenizer
    words = [tokenizer("assistant\n")["input_ids"][-1], *tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id]
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for layer in model.model.language_model.layers:  # what a token is alone says which comes next
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.language_model.norm.weight.fill_(1)
        model.lm_head.weight.zero_()
        for word, following in pairwise(words):
            model.lm_head.weight[following] = embeddings[word]
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
