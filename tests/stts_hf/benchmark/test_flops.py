"""The FLOPs that ideals are made of, against formulas worked out by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from stts_hf.benchmark.geometries import GEOMETRIES, workload_inputs
from stts_hf.benchmark.measure import Runner
from stts_hf.benchmark.meters import CONNECTOR, TOTAL, VISION_TOWER, FlopClock
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import Workload
from tests.stts_hf.benchmark import formulas, ideals

FRAMES, PATCHES, BLOCKS = 4, 81, 9
CPU = torch.device("cpu")
COMMITTED = Path(__file__).parents[3] / "docs" / "benchmarks"
SHAPE = Workload("tower", "tiny", FRAMES, text_tokens=16, timestamp_tokens=2, decode_tokens=1)
TOKENS = 16 + FRAMES * (2 + 2)  # of a row, besides the video's


@pytest.fixture(scope="module")
def models():
    return build_models("tiny", torch.float32, CPU)


@pytest.fixture
def count(models):
    """Counts the FLOPs of every stage of a pass."""

    def count(ratio, **changes) -> dict[str, float]:
        workload = dataclasses.replace(SHAPE, **changes)
        configure(models, workload, workload.backend)
        runner = Runner(workload, models, workload_inputs(workload, models[0].config, CPU))
        clock = FlopClock()
        with clock.counter:
            return runner.run(ratio, clock)

    return count


@pytest.fixture
def kept_patches(models):
    """How many patches of each frame survive."""

    def kept_patches(ratio):
        configure(models, SHAPE, "sdpa")
        inputs = workload_inputs(SHAPE, models[0].config, CPU)
        names = ("pixel_values_videos", "video_token_pooling", "video_grids")
        with torch.no_grad():
            found = models[0].model.get_video_features(**{name: inputs[name] for name in names}, pruning_ratio=ratio)
        return [9 * int(frame.sum()) for frame in found.keep_mask[0]]

    return kept_patches


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_stock_tower_and_connector(models, count, backend):
    config = models[0].config
    found = count(None, backend=backend)
    tower = formulas.patch_embedding(config, FRAMES * PATCHES) + formulas.vision_layers(config, 6, [PATCHES] * FRAMES)
    assert found[VISION_TOWER] == tower
    assert found[CONNECTOR] == formulas.connector(config, FRAMES * BLOCKS)
    assert found[TOTAL] == found[VISION_TOWER] + found[CONNECTOR]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5], ids=["stock", "k=0", "k=0.5"])
@pytest.mark.parametrize(
    "changes",
    [{"mode": "inference"}, {"mode": "training"}, {"mode": "training", "checkpointing": True}],
    ids=["inference", "training", "training with checkpointing"],
)
def test_what_ideals_work_out_is_what_is_counted(count, kept_patches, changes, ratio):
    lengths = kept_patches(ratio) if ratio else None
    expected = ideals.flops(dataclasses.replace(SHAPE, **changes), ratio, lengths)
    assert count(ratio, **changes)[TOTAL] == expected


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
    models = build_models("narrow-tower", torch.float32, CPU)
    workload = Workload("tower", "narrow-tower", 1, text_tokens=64, timestamp_tokens=7)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, CPU))
    clock = FlopClock()
    with clock.counter:
        found = runner.run(ratio, clock)
    changed = expected["score"]["flops"] - formulas.scorer(models[0].config, 81) if ratio else 0
    for stage, flops in found.items():
        assert flops == expected[stage]["flops"] - (changed if stage in (VISION_TOWER, TOTAL) else 0), stage


def share_of_text(name: str, frames: int, text_tokens: int, timestamp_tokens: int) -> tuple[float, float]:
    """FLOPs of the LLM over those of the tower, and of attention over all of the LLM's, of one row of stock Molmo2."""
    config = GEOMETRIES[name].config()
    vision = config.vision_config
    rows, cols = vision.block_grid
    tower = formulas.vision_layers(config, vision.num_hidden_layers, [9 * rows * cols] * frames)
    tokens = frames * (rows * cols + 2 + timestamp_tokens) + text_tokens
    attention = formulas.text_attention(config, tokens)
    text = attention + formulas.text_linears(config, tokens)
    return text / tower, attention / text


@pytest.mark.parametrize(
    ("small", "frames", "small_text", "large_text"),
    [("molmo2-small", 64, 858, 2075), ("molmo2-small-long", 256, 750, 2267)],
)
def test_the_scaled_down_models_have_the_proportions_of_4b(small, frames, small_text, large_text):
    ratio, attention = share_of_text(small, frames, small_text, 3)
    expected_ratio, expected_attention = share_of_text("molmo2-4b", frames, large_text, 7)
    assert ratio == pytest.approx(expected_ratio, rel=0.1)
    assert attention == pytest.approx(expected_attention, rel=0.1)


def test_every_geometry_prunes_after_the_same_share_of_its_tower():
    for name in set(GEOMETRIES) - {"tiny", "qwen3-vl-tiny"}:
        vision = GEOMETRIES[name].config().vision_config
        assert (vision.pruning_layer + 1) / vision.num_hidden_layers == pytest.approx(4 / 25, abs=0.01), name
