"""The FLOPs that ideals are made of, against formulas worked out by hand."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from stts_hf.benchmark.geometries import GEOMETRIES, workload_inputs
from stts_hf.benchmark.measure import Runner
from stts_hf.benchmark.meters import CONNECTOR, LANGUAGE_MODEL, SEQUENCE, TOTAL, VISION_TOWER, FlopClock
from stts_hf.benchmark.models import Models, build_models, configure
from stts_hf.benchmark.presets import PRESETS, Workload
from tests.stts_hf.benchmark import formulas, ideals

FRAMES, PATCHES, BLOCKS = 4, 81, 9
CPU = torch.device("cpu")
COMMITTED = Path(__file__).parents[3] / "docs" / "benchmarks"
MOLMO2 = Workload("tower", "tiny", FRAMES, text_tokens=16, timestamp_tokens=2, decode_tokens=1)
QWEN = dataclasses.replace(MOLMO2, geometry="qwen3-vl-tiny", frames=8)


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


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_stock_tower_and_connector(backend):
    config: Any = models_of("tiny")[0].config
    found = count(dataclasses.replace(MOLMO2, backend=backend), None)
    tower = formulas.patch_embedding(config, FRAMES * PATCHES) + formulas.vision_layers(config, 6, [PATCHES] * FRAMES)
    assert found[VISION_TOWER] == tower
    assert found[CONNECTOR] == formulas.connector(config, FRAMES * BLOCKS)
    assert found[TOTAL] == found[VISION_TOWER] + found[CONNECTOR]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5], ids=["stock", "k=0", "k=0.5"])
@pytest.mark.parametrize("shape", [MOLMO2, QWEN], ids=lambda shape: shape.geometry)
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
    workload = dataclasses.replace(shape, **changes)
    lengths = kept_patches(workload, ratio) if ratio else None
    assert count(workload, ratio)[TOTAL] == ideals.flops(workload, ratio, lengths)


def test_the_stages_make_the_whole():
    for ratio in (None, 0.5):
        found = count(dataclasses.replace(QWEN, mode="inference"), ratio)
        assert found[TOTAL] == found[VISION_TOWER] + found[CONNECTOR] + found[SEQUENCE] + found[LANGUAGE_MODEL]
        assert found[CONNECTOR] > 0 == found[SEQUENCE]


def test_stock_and_unpruned_agree():
    run = runner_of(dataclasses.replace(QWEN, mode="inference"))
    with torch.no_grad():
        ours, stock = run.model(**run.inputs, pruning_ratio=0.0).logits, run.stock(**run.inputs).logits
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)  # float32 through six layers and three


def test_pytorchs_variable_length_attention_is_counted():
    pytest.importorskip("torch.nn.attention.varlen")
    formula = flop_registry[torch.ops.torch_attn._varlen_attn]
    query, key = torch.empty(7, 3, 8, device="meta"), torch.empty(9, 3, 8, device="meta")
    bounds = torch.tensor([0, 2, 7]), torch.tensor([0, 5, 9])
    assert formula(query, key, key, *bounds, 5, 5) == 4 * (2 * 5 + 5 * 4) * 3 * 8


@pytest.mark.parametrize("ratio", [None, 0.5], ids=["stock", "k=0.5"])
def test_another_version_of_pytorch_counted_the_same(ratio):
    """Those of a committed result, made with torch 2.15 and another scorer, of a frame that may not lose anything."""
    (cell, *_) = json.loads((COMMITTED / "scaling" / "result.json").read_text())["cells"]
    expected = {variant["pruning_ratio"]: variant["stages"] for variant in cell["variants"]}[ratio]
    found = count(Workload("tower", "narrow-tower", 1, text_tokens=64, timestamp_tokens=7), ratio)
    changed = expected["score"]["flops"] - formulas.scorer(GEOMETRIES["narrow-tower"].config(), 81) if ratio else 0
    for stage, flops in found.items():
        assert flops == expected[stage]["flops"] - (changed if stage in (VISION_TOWER, TOTAL) else 0), stage


@pytest.mark.parametrize(("small", "large_text"), [("paper-small", 2075), ("paper-small-256", 2267)])
def test_the_scaled_down_molmo2_has_the_proportions_of_4b(small, large_text):
    """FLOPs of the LLM over those of the tower, and of attention over those of the LLM."""

    def shares(workload: Workload) -> tuple[float, float]:
        config = GEOMETRIES[workload.geometry].config()
        vision, blocks = config.vision_config, math.prod(GEOMETRIES[workload.geometry].grid)
        tower = formulas.vision_layers(config, vision.num_hidden_layers, [9 * blocks] * workload.frames)
        tokens = workload.text_tokens + workload.frames * (blocks + 2 + workload.timestamp_tokens)
        attention = formulas.text_attention(config, tokens)
        text = attention + formulas.text_linears(config, tokens)
        return text / tower, attention / text

    ours = PRESETS[small].workloads[0]
    theirs = dataclasses.replace(ours, geometry="molmo2-4b", text_tokens=large_text, timestamp_tokens=7)
    assert shares(ours) == pytest.approx(shares(theirs), rel=0.1)


def test_the_scaled_down_qwen3_vl_has_the_proportions_of_4b():
    """FLOPs of the LLM over those of the tower, and what dropping half allows."""

    def shares(preset: str) -> tuple[float, float]:
        workload = PRESETS[preset].workloads[0]
        tower = ideals.flops(dataclasses.replace(workload, mode="tower"), None)
        stock, pruned = ideals.flops(workload, None), ideals.flops(workload, 0.5)
        return (stock - tower) / tower, stock / pruned

    assert shares("qwen-small") == pytest.approx(shares("qwen"), rel=0.1)


def test_every_geometry_prunes_after_the_same_share_of_its_tower():
    for name in set(GEOMETRIES) - {"tiny", "qwen3-vl-tiny"}:
        vision = GEOMETRIES[name].config().vision_config
        assert (vision.pruning_layer + 1) / vision.num_hidden_layers == pytest.approx(4 / 25, abs=0.01), name
