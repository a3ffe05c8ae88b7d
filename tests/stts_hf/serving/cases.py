"""What is asked of vLLM and of `generate`: requests of all kinds, and the tiny checkpoints that answer them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from stts_hf.video.processors import process
from tests.checkpoints import TINIES, TINY, load_talkative
from tests.clips import numbered_frame, write_clip

SETTINGS = [
    ("molmo2", 0, "original"),
    ("molmo2", 0, "compact"),
    ("molmo2", 0.5, "original"),
    ("molmo2", 0.5, "compact"),
    ("molmo2", 1, "original"),
    ("molmo2", 1, "compact"),
    ("qwen3_vl", 0, "original"),
    ("qwen3_vl", 0.5, "original"),
    ("qwen3_vl", 1, "original"),
    ("qwen3_vl tied", 0.5, "original"),
]


def make_checkpoints(folder: Path) -> dict[str, Path]:
    """Of Qwen3-VL one with a head of its own too, and a language model drawn anew, which does not repeat itself."""
    model = load_talkative(TINIES["qwen3_vl"])
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder / "qwen3_vl")
    AutoProcessor.from_pretrained(TINIES["qwen3_vl"]).save_pretrained(folder / "qwen3_vl")
    return {"molmo2": TINY, "qwen3_vl": folder / "qwen3_vl", "qwen3_vl tied": TINIES["qwen3_vl"]}


def make_clips(folder: Path) -> list[Path]:
    return [write_clip(folder / f"{frames}.mp4", frames, fps=20) for frames in (240, 20, 60, 15, 40)]


@dataclass
class Request:
    """A prompt of `media`, video files and images in the order of the template, and a question."""

    question: str
    videos: Sequence[Path] = ()
    images: Sequence[Image.Image] = field(default_factory=list)

    def prompt(self, processor: Any) -> str:
        media = [{"type": "image"}] * len(self.images) + [{"type": "video"}] * len(self.videos)
        content: Any = [*media, {"type": "text", "text": self.question}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def for_vllm(self, processor: Any) -> Any:
        data = {"video": [video.read_bytes() for video in self.videos], "image": list(self.images)}
        ids = processor.tokenizer(self.prompt(processor), add_special_tokens=False)["input_ids"]
        return {"prompt_token_ids": ids, "multi_modal_data": {name: items for name, items in data.items() if items}}

    def for_model(self, processor: Any) -> dict[str, torch.Tensor]:
        """The processor's inputs."""
        parts = self.prompt(processor).split(processor.video_token)
        if len(self.videos) > getattr(processor, "max_videos", len(self.videos)):
            return self._put_together(processor, parts)
        options: dict[str, Any] = {"images": list(self.images)} if self.images else {}
        videos = [str(video) for video in self.videos]
        return dict(process(processor, text=[self.prompt(processor)], videos=videos, **options, return_tensors="pt"))

    def _put_together(self, processor: Any, parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Of Molmo2's, which takes one video a text: `parts` of the prompt with a video between two."""
        pieces = []
        for before, video in zip(parts, self.videos, strict=False):
            pieces.append(processor(text=before + processor.video_token, videos=[str(video)], return_tensors="pt"))
        pieces.append(processor(text=parts[-1], return_tensors="pt"))
        inputs = {}
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):  # one BOS, the first's
            inputs[name] = torch.cat([piece[name][:, bool(place) :] for place, piece in enumerate(pieces)], dim=-1)
        pooling, patches = [], 0
        for piece in pieces[:-1]:
            rows = piece["video_token_pooling"]
            pooling.append(torch.where(rows >= 0, rows + patches, rows))
            patches += piece["pixel_values_videos"].shape[:2].numel()
        inputs["video_token_pooling"] = torch.cat(pooling)
        for name in ("pixel_values_videos", "video_grids"):
            inputs[name] = torch.cat([piece[name] for piece in pieces[:-1]])
        return inputs


def make_requests(clips: Sequence[Path]) -> list[Request]:
    """Eight of different lengths: videos of 4 to 24 frames, one twice, two in a request, images."""
    picture = Image.fromarray(numbered_frame(7))
    wide = Image.fromarray(np.tile(numbered_frame(9), (1, 2, 1)))
    return [
        Request("What moves?", [clips[0]]),
        Request("How many shapes are there, and which of them is the largest?", [clips[1]]),
        Request("What moves?", [clips[2]]),
        Request("Where?", [clips[3]]),
        Request("Which colour has the square at the end?", [clips[0]]),
        Request("Which is longer?", [clips[3], clips[1]]),
        Request("Is it in the video?", [clips[4]], [picture]),
        Request("What differs?", images=[picture, wide]),
    ]
