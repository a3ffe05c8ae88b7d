"""Passes take turns, memory is what it is, and what does not fit leaves the rest alone."""

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

from stts_hf.benchmark import measure as measuring
from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import Runner, measure
from stts_hf.benchmark.meters import Clock, limited_to_free_memory, peak_memory
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import PRESETS, Workload, vary
from tests.backbones import BACKBONES, Clip

CPU = torch.device("cpu")
TOWER = Workload("tower", "tiny", 2, (0.0, 0.5))
TRAINING = TOWER._replace(mode="training", text_tokens=8, timestamp_tokens=1)


def status_of(error: Exception) -> str:
    """The status noted for an error."""
    found: dict[str, str] = {}
    with measuring._noting_failure(found, CPU):
        raise error
    return found["status"]


@pytest.fixture(scope="module")
def models():
    return build_models("tiny", torch.float32, CPU)


def test_stock_and_unpruned_agree_in_loss(models):
    configure(models, TRAINING, "sdpa")
    inputs = workload_inputs(TRAINING, models[0].config, CPU)
    with torch.no_grad():
        ours, stock = models[0](**inputs, pruning_ratio=0.0).task_loss, models[1](**inputs).loss
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)  # float32 through six layers and two


def test_a_training_pass_leaves_no_gradients_and_moves_no_weights(models):
    configure(models, TRAINING, "sdpa")
    before = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
    runner = Runner(TRAINING, models, workload_inputs(TRAINING, models[0].config, CPU))
    for ratio in (None, 0.5):
        assert set(runner.run(ratio, Clock(CPU))) == {"forward", "backward", "optimiser_step", "total"}
        assert all(parameter.grad is None for model in models for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in models[0].named_parameters())


def test_the_processors_clock_leaves_waiting_out_and_is_refused_on_a_gpu():
    clocks = [Clock(CPU), Clock(CPU, of_processor=True)]
    starts = [clock.read() for clock in clocks]
    time.sleep(0.2)
    waited, worked = (clock.between(start, clock.read()) for clock, start in zip(clocks, starts, strict=True))
    assert waited >= 0.2 > 2 * worked
    with pytest.raises(ValueError, match="--clocks processor does not count a GPU's seconds"):
        measuring.check_runnable(vary(PRESETS["tiny"], clock=["processor"]), torch.device("cuda"))


def test_a_tower_runs_without_the_inputs_that_may_be_left_out():
    """Qwen2.5-VL's `second_per_grid_ts`, which its tower does not read."""
    qwen = next(backbone for backbone in BACKBONES if backbone.name == "qwen2_5_vl")
    model, inputs = qwen.model().eval(), qwen.alone([[Clip(3)]])[0]
    del inputs["second_per_grid_ts"]
    assert Runner(TOWER, (model, model), inputs).run(0.5, Clock(CPU))["total"] > 0


def test_peak_memory_is_the_highest_sum_of_what_is_held():
    def run():
        first = torch.ones(1000, 1000)  # 4 MB
        second = torch.ones(500, 1000)  # 2 MB, beside the first
        del first
        third = torch.ones(700, 1000)  # 2.8 MB, beside the second
        return second.shape, third.shape

    _, peak = peak_memory(run, CPU)
    assert peak == 6_000_000


@pytest.mark.slow
def test_a_pass_without_memory_is_noted_and_the_others_go_on(models, monkeypatch):
    real = Runner.run

    def run(self, ratio, clock):
        if ratio == 0.0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return real(self, ratio, clock)

    monkeypatch.setattr(Runner, "run", run)
    cell = measure(TOWER, models, CPU, repeats=1)
    assert [variant["status"] for variant in cell["variants"]] == ["ok", "out of memory", "ok"]
    assert "1 TiB" in cell["variants"][1]["reason"]


@pytest.mark.slow
def test_flex_attention_is_never_given_up_for_uncompiled_code():
    """PyTorch's default is to go on uncompiled after eight versions."""
    counter = CompileCounter()
    compiled = torch.compile(lambda tensor: tensor + len(tensor), backend=counter, dynamic=False)
    with measuring._prepared(TOWER._replace(backend="flex_attention"), CPU):
        for size in range(2, 14):
            compiled(torch.ones(size))
        assert counter.frame_count == 12
        with torch._dynamo.config.patch(recompile_limit=12), pytest.raises(FailOnRecompileLimitHit) as caught:
            compiled(torch.ones(20))
    assert status_of(caught.value) == "failed"


def test_allocations_fail_before_the_machine_runs_out(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20_000_000))
    with limited_to_free_memory(CPU), pytest.raises(RuntimeError) as caught:
        torch.empty(1_000_000_000)  # more than an allocator keeps for later, and never touched
    assert status_of(caught.value) == "out of memory"
    assert torch.ones(30_000_000).sum() == 30_000_000  # and the limit is gone
