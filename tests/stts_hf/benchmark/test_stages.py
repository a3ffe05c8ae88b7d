"""What is counted as selecting and packing: every gather of survivors, and nothing twice."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import Runner
from stts_hf.benchmark.meters import SCORE, SELECT_AND_PACK, TOTAL, VISION_TOWER, Clock
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import Workload

CPU = torch.device("cpu")
GATHER, SCATTER = torch.ops.aten.index.Tensor, torch.ops.aten.index_copy.default


class Moves(TorchDispatchMode):
    """A clock that ticks with every call of an operator that moves rows as wide as the ViT."""

    def __init__(self, operator, width: int):
        super().__init__()
        self.operator, self.width, self.ticks = operator, width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.ticks += function == self.operator and output.shape[-1] == self.width
        return output

    def read(self) -> int:
        return self.ticks

    def synchronize(self) -> None:
        pass

    def between(self, start: int, end: int) -> int:
        return end - start


@pytest.fixture(scope="module")
def models():
    return build_models("tiny", torch.float32, CPU)


@pytest.fixture
def run(models):
    """Runs a pass with a clock; returns its stages."""

    def run(ratio, clock, layout="varlen") -> dict[str, float]:
        workload = Workload("tower", "tiny", 4, layout=layout)
        configure(models, workload, "sdpa")
        return Runner(workload, models, workload_inputs(workload, models[0].config, CPU)).run(ratio, clock)

    return run


@pytest.fixture
def moves(models, run):
    """How often each stage of a pass moves rows by an operator."""

    def moves(operator, ratio, layout="varlen") -> dict[str, float]:
        with Moves(operator, models[0].config.vision_config.hidden_size) as clock:
            return run(ratio, clock, layout)

    return moves


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_every_gather_of_the_tower_is_in_it_once(moves, ratio):
    found = moves(GATHER, ratio)
    # The scorer's blocks, queries and residual of layer l + 1; the features are those of later layers.
    assert found[SELECT_AND_PACK] == found[VISION_TOWER] - found[SCORE] == 3


@pytest.mark.parametrize(("layout", "packed"), [("varlen", 0), ("first_fit_descending", 1)])
def test_packing_bins_is_in_it(moves, layout, packed):
    found = moves(SCATTER, 0.5, layout)
    assert found[SELECT_AND_PACK] == found[TOTAL] == packed


def test_nothing_is_packed_where_nothing_is_kept(moves):
    assert SELECT_AND_PACK not in moves(GATHER, 1.0)


def test_no_hook_stays(models, run):
    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in models[0].modules())

    before = hooks()
    run(0.5, Clock(CPU))
    assert hooks() == before
