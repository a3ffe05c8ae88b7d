"""The walks in docs/reading.md are the orders in which real calls go through the code."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from tests.clips import write_clip
from tests.conftest import REPOSITORY
from tests.training_files import train, write_config, write_data


def called_by(function: Callable[[], Any]) -> tuple[list[str], Any]:
    """Qualified names of our functions that a call goes through, in order, and what it returns."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/stts_hf/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return names, result


def listed_under(heading: str) -> list[str]:
    section = (REPOSITORY / "docs" / "reading.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", section, re.M)


def check_walk(names: list[str], heading: str, repeated: dict[str, int]) -> None:
    """All listed calls come in the page's order, each once but for those `repeated` so many times."""
    listed = listed_under(heading)
    happened = [name for name in names if name in listed]
    assert list(dict.fromkeys(happened)) == listed
    assert {name: count for name, count in Counter(happened).items() if count > 1} == repeated


def test_from_processor_to_logits(hub_configs, tmp_path):
    processor = STTSProcessor.from_pretrained(hub_configs / "stts-tiny")
    model = STTSForConditionalGeneration.from_pretrained(hub_configs / "stts-tiny").eval()
    clip = str(write_clip(tmp_path / "clip.mp4", 10))
    before, inputs = called_by(
        lambda: processor(text=["<|video|> What?"], videos=[clip], num_frames=3, return_tensors="pt")
    )
    with torch.no_grad():
        after, output = called_by(lambda: model(**inputs))
    assert output.logits.shape[:2] == output.kept_indices.shape
    layers_from_the_drop_on = 4  # of 6, with the pruning layer 1
    check_walk(before + after, "From `processor(...)` to `logits`", {"packed_attention": layers_from_the_drop_on})


def test_from_a_yaml_file_to_the_first_gradient(tmp_path):
    more = 'pack_to: 700\nsave_strategy: "no"\nreport_to: none\n'
    config = write_config(tmp_path, write_data(tmp_path, clips=3), tmp_path / "out", more=more)
    names, status = called_by(lambda: train(config))
    assert status == 0
    repeated = {"render": 3, "count_tokens": 3, "encode": 3}  # each row once
    check_walk(names, "From a YAML file to the first gradient", repeated)
