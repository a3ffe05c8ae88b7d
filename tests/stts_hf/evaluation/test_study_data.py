"""What several processes do in one study's folder at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stts_hf.evaluation import study_data
from stts_hf.evaluation.study import Run, Settings, Study


def test_two_shells_at_a_start_decode_once(tmp_path, monkeypatch):
    decoded = []

    def load_slowly(path):
        decoded.append(path)
        time.sleep(0.3)  # enough for the other to find that nothing is there
        return []

    monkeypatch.setattr(study_data, "load_rows", load_slowly)
    with ThreadPoolExecutor(2) as shells:
        starts = [shells.submit(study_data.encode_conversations, tmp_path, None, tmp_path) for _ in range(2)]
    assert [start.result() for start in starts] == [None, None]
    assert len(decoded) == 1
    assert torch.load(tmp_path / "encoded" / "conversations.pt") == []


def test_a_failure_that_another_process_deletes_is_no_outcome(tmp_path, monkeypatch):
    """It was there for the look, and is gone for the reading."""
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    study = Study(tmp_path, Settings(dataset="d", base="b", base_layer=3), tmp_path, tmp_path)
    run = Run("stts", 0.5, 3, 0)
    assert (study.is_over(run), study.has_failed(run)) == (False, False)
