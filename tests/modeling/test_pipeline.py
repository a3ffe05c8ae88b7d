"""transformers' pipelines: options of `generate` reach it, and those that would be lost are refused."""

import pytest
import torch
from transformers import AnyToAnyPipeline

from stts_hf import STTSProcessor
from tests.checkpoints import TINY, load_tiny, write_small_clip


@pytest.fixture(scope="module")
def pipe() -> AnyToAnyPipeline:
    return AnyToAnyPipeline(model=load_tiny(), processor=STTSProcessor.from_pretrained(TINY))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> list[dict]:
    clip = str(write_small_clip(tmp_path_factory.mktemp("clip")))
    question = {"type": "text", "text": "What is moving?"}
    return [{"role": "user", "content": [{"type": "video", "url": clip}, question]}]


def test_a_ratio_among_generates_options_counts(pipe, chat, monkeypatch):
    kept: list[torch.Tensor] = []
    prune = pipe.model.model.prune

    def remember(*arguments, **options):
        pruned = prune(*arguments, **options)
        kept.append(pruned.video.keep_mask[0])
        return pruned

    monkeypatch.setattr(pipe.model.model, "prune", remember)
    for ratio in (0.0, 0.5):
        assert pipe(text=chat, generate_kwargs={"pruning_ratio": ratio, "max_new_tokens": 2})
    assert kept[0].all()
    assert int((~kept[1]).sum()) == kept[1].numel() // 2


def test_a_ratio_that_only_the_processor_would_see_is_refused(pipe, chat):
    with pytest.raises(ValueError, match=r"pruning_ratio=0.5 has no effect"):
        pipe(text=chat, pruning_ratio=0.5, max_new_tokens=2)
