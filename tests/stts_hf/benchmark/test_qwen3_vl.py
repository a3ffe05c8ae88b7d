"""Qwen3-VL in the benchmark: FLOPs against closed forms, stages, and the stock model beside it."""

import dataclasses

import pytest
import torch

from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import Runner
from stts_hf.benchmark.meters import CONNECTOR, LANGUAGE_MODEL, SEQUENCE, TOTAL, VISION_TOWER, FlopClock
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import PRESETS, Workload
from tests.stts_hf.benchmark import ideals_qwen3_vl as ideals

CPU = torch.device("cpu")
SHAPE = Workload("inference", "qwen3-vl-tiny", 8, text_tokens=16, timestamp_tokens=2, decode_tokens=1)


@pytest.fixture(scope="module")
def models():
    return build_models("qwen3-vl-tiny", torch.float32, CPU)


@pytest.fixture
def runner(models):
    def runner(**changes) -> Runner:
        workload = dataclasses.replace(SHAPE, **changes)
        configure(models, workload, workload.backend)
        return Runner(workload, models, workload_inputs(workload, models[0].config, CPU))

    return runner


def count(runner: Runner, ratio: float | None) -> dict[str, float]:
    clock = FlopClock()
    with clock.counter:
        return runner.run(ratio, clock)


def kept_patches(runner: Runner, ratio: float) -> list[int]:
    """How many patches of each tubelet survive."""
    with torch.no_grad():
        videos = {name: runner.inputs[name] for name in runner.model.model.video_inputs}
        found = runner.model.model.get_video_features(**videos, pruning_ratio=ratio)
    return [4 * int(frame.sum()) for frame in found.keep_mask[0]]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5], ids=["stock", "k=0", "k=0.5"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "inference"},
        {"mode": "inference", "selector": "cosine", "pruning_layer": 3},
        {"mode": "training", "checkpointing": True},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_what_ideals_work_out_is_what_is_counted(runner, changes, ratio):
    run = runner(**changes)
    lengths = kept_patches(run, ratio) if ratio else None
    expected = ideals.flops(run.workload, ratio, lengths)
    assert count(run, ratio)[TOTAL] == expected


def test_the_stages_make_the_whole(runner):
    for ratio in (None, 0.5):
        found = count(runner(), ratio)
        assert found[TOTAL] == found[VISION_TOWER] + found[CONNECTOR] + found[SEQUENCE] + found[LANGUAGE_MODEL]
        assert found[CONNECTOR] > 0 == found[SEQUENCE]


def test_stock_and_unpruned_agree(runner):
    run = runner()
    with torch.no_grad():
        ours, stock = run.model(**run.inputs, pruning_ratio=0.0).logits, run.stock(**run.inputs).logits
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)  # float32 through six layers and three


def test_the_scaled_down_model_has_the_proportions_of_4b():
    def shares(preset: str) -> tuple[float, float]:
        """FLOPs of the LLM over those of the tower, and what dropping half allows."""
        workload = PRESETS[preset].workloads[0]
        tower, stock, pruned = (
            ideals.flops(it, ratio)
            for it, ratio in ((dataclasses.replace(workload, mode="tower"), None), (workload, None), (workload, 0.5))
        )
        return (stock - tower) / tower, stock / pruned

    for small, large in zip(shares("qwen-small"), shares("qwen"), strict=True):
        assert small == pytest.approx(large, rel=0.1)
