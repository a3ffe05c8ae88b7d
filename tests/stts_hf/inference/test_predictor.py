"""Every file of the corpus as a row of a prediction."""

import re

import pytest

from stts_hf.inference.predictor import Predictor
from tests.checkpoints import TINY
from tests.corpus.files import CASES, EMPTY, NO_FILE


@pytest.mark.slow
def test_every_file_of_the_corpus_is_a_row(tmp_path):
    rows: list[dict[str, str]] = []
    for name, case in CASES.items():
        (tmp_path / str(len(rows))).mkdir()
        rows.append({"id": name, "video": str(case.make(tmp_path / str(len(rows)))), "prompt": "What moves?"})
    predictor = Predictor(str(TINY), max_new_tokens=1, num_workers=2)
    found = {row["id"]: row for row in predictor.predict(rows)}
    assert found.keys() == CASES.keys()
    for name, case in CASES.items():
        assert (found[name]["error"] is None) == (case.refused is None), found[name]
        # What is no file is refused before a process is asked to decode it, in other words.
        if case.refused not in (None, NO_FILE, EMPTY):
            assert re.search(case.refused, found[name]["error"])
