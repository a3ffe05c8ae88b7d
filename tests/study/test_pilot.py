"""A scorer fitted to answers on a frozen checkpoint and asked beside cosine, on a handful of clips."""

import json

import pytest

from examples.study.make_dataset import make_dataset
from examples.study.pilot import ask, fit
from tests.checkpoints import TINY, weights_of


@pytest.mark.study
def test_fit_and_ask(tmp_path, capsys):
    data = tmp_path / "data"
    list(make_dataset(data, {"train": 6, "validation": 3, "test": 4}, seed=3))
    fit(TINY, tmp_path / "out", [data], epochs=2)
    best = tmp_path / "out" / "best"
    changed = {name for name, weight in weights_of(best).items() if not weight.equal(weights_of(TINY)[name])}
    assert changed
    assert all("scorer" in name for name in changed)
    config = json.loads((best / "config.json").read_text())
    assert (config["scorer_target"], config["vision_config"]["score_bias"]) == ("answers", False)
    assert config["worth_unit"] > 0
    ask(best, data, 2, [0.9], tmp_path / "marks.json", ["scorer", "cosine"])
    marks = json.loads((tmp_path / "marks.json").read_text())
    assert {len(marks[name]) for name in ("clips", "scorer 0.9", "cosine 0.9")} == {len(marks["clips"])}
    assert "data, scorer, 90% dropped: " in capsys.readouterr().out
