"""The FLOPs that ideals are made of, against formulas worked out by hand."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import Runner
from stts_hf.benchmark.meters import (
    CONNECTOR,
    LANGUAGE_MODEL,
    SEQUENCE,
    TOTAL,
    VISION_TOWER,
    Clock,
    FlopClock,
    peak_memory,
)
from stts_hf.benchmark.models import Models, build_models, configure
from stts_hf.benchmark.presets import Workload
from tests.backbones import MIXTURES, Clip
from tests.stts_hf.benchmark import ideals

FRAMES, PATCHES, BLOCKS = 4, 81, 9
CPU = torch.device("cpu")
MOLMO2 = Workload("tower", "tiny", FRAMES, text_tokens=16, timestamp_tokens=2, decode_tokens=1)
QWEN = MOLMO2._replace(geometry="qwen3-vl-tiny", frames=8)
SMOLVLM = MOLMO2._replace(geometry="smolvlm2-tiny")


@functools.cache
def models_of(geometry: str) -> Models:
    return build_models(geometry, torch.float32, CPU)


def runner_of(workload: Workload) -> Runner:
    models = models_of(workload.geometry)
    configure(models, workload, workload.backend)
    return Runner(workload, models, workload_inputs(workload, models[0].config, CPU))


def count(workload: Workload, ratio: float | None) -> dict[str, float]:
    """FLOPs of every stage of a pass."""
    clock = FlopClock()
    with clock.counter:
        return runner_of(workload).run(ratio, clock)


def kept_patches(workload: Workload, ratio: float) -> list[int]:
    """How many patches of each frame of the tower survive."""
    runner = runner_of(workload)
    model: Any = runner.model.model
    with torch.no_grad():
        videos = {name: runner.inputs[name] for name in model.video_inputs if name in runner.inputs}
        found = model.get_video_features(**videos, pruning_ratio=ratio)
    return [(9 if workload.geometry == "tiny" else 4) * int(frame.sum()) for frame in found.keep_mask[0]]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5], ids=["stock", "k=0", "k=0.5"])
@pytest.mark.parametrize("shape", [MOLMO2, QWEN, SMOLVLM], ids=lambda shape: shape.geometry)
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "inference"},
        {"mode": "inference", "selector": "cosine", "pruning_layer": 3},
        {"mode": "training"},
        {"mode": "training", "checkpointing": True},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_what_ideals_work_out_is_what_is_counted(shape, changes, ratio):
    workload = shape._replace(**changes)
    lengths = kept_patches(workload, ratio) if ratio else None
    assert count(workload, ratio)[TOTAL] == ideals.flops(workload, ratio, lengths)


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda backbone: backbone.name)
def test_products_of_experts_count_as_those_of_each_expert_alone(mixture):
    found = []
    for implementation in ("grouped_mm", "eager"):
        model, clock = mixture.model(), FlopClock()
        model.set_experts_implementation(implementation)
        with clock.counter:
            loss = model(**mixture.batch([[3, Clip(3), 5]], "left"), pruning_ratio=0.5).loss
            forward = clock.read()
            loss.backward()
        found.append((forward, clock.read()))
    assert found[0] == found[1]


def test_the_stages_make_the_whole():
    for ratio in (None, 0.5):
        found = count(QWEN._replace(mode="inference"), ratio)
        assert found[TOTAL] == found[VISION_TOWER] + found[CONNECTOR] + found[SEQUENCE] + found[LANGUAGE_MODEL]
        assert found[CONNECTOR] > 0 == found[SEQUENCE]


def test_counting_keeps_nothing_that_gradient_checkpointing_gives_up():
    """PyTorch's own counter does: by it, a step on a GPU took twice its memory, and did not fit."""
    deep = MOLMO2._replace(mode="training", checkpointing=True, frames=32)
    runner, counted = runner_of(deep), FlopClock()
    runner.run(None, Clock(CPU))  # what is kept for later calls
    _, peak = peak_memory(lambda: runner.run(None, Clock(CPU)), CPU)
    with counted.counter:
        _, of_count = peak_memory(lambda: runner.run(None, counted), CPU)
    assert of_count < 1.1 * peak
    with FlopCounterMode(display=False):
        _, of_pytorch = peak_memory(lambda: runner.run(None, Clock(CPU)), CPU)
    assert of_pytorch > 2 * peak
