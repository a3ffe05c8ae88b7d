"""A ranking is one function registered in one place: every command then takes its name, and a model answers with it."""

import subprocess
import sys

import pytest
import torch

from stts_hf.cli.main import build_parser
from stts_hf.modeling.selectors_stts import SELECTORS as REGISTERED
from stts_hf.modeling.selectors_stts import Selector
from stts_hf.selectors import SELECTORS
from stts_hf.visualize.figures import colour_of
from tests.tiny import Video, build_inputs, tiny_model

NAMES = "import stts_hf.selectors, sys; print(*stts_hf.selectors.SELECTORS, 'torch' in sys.modules)"
COMMANDS = {
    "run": ["clip.mp4", "What?", "--selector", "last"],
    "predict": ["rows.jsonl", "--output", "out.jsonl", "--selector", "last"],
    "eval": ["rows.jsonl", "--selector", "last"],
    "visualize": ["clip.mp4", "--output", "out", "--selectors", "last"],
    "bench": ["--selectors", "last"],
    "convert": ["stock", "out", "--selector", "last"],
}


def keep_last(tower, blocks, grids, valid):
    """the last frames stay"""
    return torch.cat([torch.arange(float(frames * rows * cols)) for frames, rows, cols in grids]).to(blocks.device)


@pytest.fixture
def last(monkeypatch) -> None:
    monkeypatch.setitem(REGISTERED, "last", Selector(keep_last))


@pytest.mark.usefixtures("last")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_what_is_registered(command):
    arguments = vars(build_parser().parse_args([command, *COMMANDS[command]]))
    assert "last" in (arguments.get("selector"), *(arguments.get("selectors") or ()))


@pytest.mark.usefixtures("last")
def test_it_is_shown_and_ranks():
    shown = SELECTORS["last"]
    assert (shown.label, shown.about, shown.is_learned) == ("last", "the last frames stay", False)
    assert colour_of("last") == shown.colour
    assert SELECTORS.of_kind(False) == ["cosine", "random", "last"]
    model = tiny_model()
    model.config.vision_config.selector = "last"
    with torch.no_grad():
        [mask] = model(**build_inputs([[2, Video(6), 3]]), pruning_ratio=0.5).keep_mask
    kept = mask.flatten().nonzero().flatten().tolist()
    frame = mask.shape[1]
    assert kept == [*range(frame), *range(mask.numel() - len(kept) + frame, mask.numel())]


def test_names_are_read_without_pytorch():
    printed = subprocess.run([sys.executable, "-c", NAMES], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["scorer", "cosine", "random", "False"]
