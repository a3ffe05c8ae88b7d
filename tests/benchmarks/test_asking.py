"""Ways to ask several questions about a video: they write the same, and a way that does not is noted."""

import pytest
import torch

from examples.benchmarks.__main__ import ASKED
from examples.benchmarks.asking import CALLS, ONE_BY_ONE, TOGETHER, measure_questions
from stts_hf.benchmark.report import table

CPU = torch.device("cpu")


@pytest.fixture(params=["tiny", "qwen3-vl-tiny"])
def workload(request):
    return ASKED._replace(geometry=request.param, frames=4, text_tokens=5, decode_tokens=3)


def test_all_ways_write_the_same(workload):
    cell = measure_questions(workload, 0.5, CPU, 1)
    assert [variant["name"] for variant in cell["variants"]] == [CALLS, ONE_BY_ONE, TOGETHER]
    for variant in cell["variants"]:
        assert variant["same_tokens"] is True
        assert variant["peak_memory"] > 0
        assert len(variant["stages"]["total"]["seconds"]) == 1
    assert "| same tokens | yes | yes | yes |" in table([cell])
