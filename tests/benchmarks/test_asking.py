"""Ways to ask several questions about a video: they write the same, and a way that does not is noted."""

import dataclasses

import pytest
import torch

from examples.benchmarks.__main__ import ASKED
from examples.benchmarks.asking import CALLS, ONE_BY_ONE, TOGETHER, Questions, measure_questions
from stts_hf.benchmark.report import table

CPU = torch.device("cpu")


@pytest.fixture(params=["tiny", "qwen3-vl-tiny"])
def workload(request):
    return dataclasses.replace(ASKED, geometry=request.param, frames=4, text_tokens=5, decode_tokens=3)


def test_all_ways_write_the_same(workload):
    cell = measure_questions(workload, 0.5, CPU, 1)
    assert [variant["name"] for variant in cell["variants"]] == [CALLS, ONE_BY_ONE, TOGETHER]
    for variant in cell["variants"]:
        assert variant["same_tokens"] is True
        assert variant["peak_memory"] > 0
        assert len(variant["stages"]["total"]["seconds"]) == 1
    assert "| same tokens | yes | yes | yes |" in table([cell])


def test_answers_differ_from_question_to_question(workload):
    """Else the comparison would say nothing."""
    answers = Questions.draw(workload, 0.5, CPU).ask_one_by_one()
    assert len(answers.unique(dim=0)) > 1


@pytest.mark.parametrize("workload", ["tiny"], indirect=True)
def test_other_tokens_are_noted(workload, monkeypatch):
    real = Questions.ask_together
    monkeypatch.setattr(Questions, "ask_together", lambda questions: real(questions).roll(1, 0))
    cell = measure_questions(workload, 0.5, CPU, 1)
    assert [variant["same_tokens"] for variant in cell["variants"]] == [True, True, False]
    assert "**no**" in table([cell])
