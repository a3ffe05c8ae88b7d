"""The walk in docs/reading.md is the order in which a real call goes through the code."""

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from tests.clips import write_clip
from tests.conftest import REPOSITORY

HEADING = "## From `processor(...)` to `logits`"
REPEATED = {"packed_attention"}  # by every layer from `l + 1` on


def called_by(function: Callable[[], Any]) -> tuple[list[str], Any]:
    """Qualified names of the functions of `modeling/` that a call goes through, and what it returns."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("_stts.py"):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return names, result


@pytest.fixture(scope="module")
def listed() -> list[str]:
    section = (REPOSITORY / "docs" / "reading.md").read_text().split(HEADING)[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", section, re.M)


def test_calls_happen_once_and_in_the_order_of_the_page(listed, hub_configs, tmp_path):
    processor = STTSProcessor.from_pretrained(hub_configs / "stts-tiny")
    model = STTSForConditionalGeneration.from_pretrained(hub_configs / "stts-tiny").eval()
    clip = str(write_clip(tmp_path / "clip.mp4", 10))
    before, inputs = called_by(
        lambda: processor(text=["<|video|> What?"], videos=[clip], num_frames=3, return_tensors="pt")
    )
    with torch.no_grad():
        after, output = called_by(lambda: model(**inputs))
    assert output.logits.shape[:2] == output.kept_indices.shape
    happened = [name for name in before + after if name in listed]
    assert list(dict.fromkeys(happened)) == listed
    assert {name for name in happened if happened.count(name) > 1} <= REPEATED
