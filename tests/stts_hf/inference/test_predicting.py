"""Many clips: the answers are those of one call after the other, whatever is killed and whatever is corrupt."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from stts_hf.inference.predicting import Predictor
from tests.checkpoints import TINY, load_talkative, messages
from tests.clips import write_clip
from tests.corpus.files import CASES, EMPTY, NO_FILE

CLIPS, CORRUPT, KILLS = 200, 20, 20


@pytest.fixture
def clips(tmp_path) -> Path:
    """Clips of 10 kinds, and among them files that are cut off, filled with noise or empty."""
    kinds = [write_clip(tmp_path / f"kind{kind}.mp4", 5 + 2 * kind, fps=20, gop=3 + kind) for kind in range(10)]
    folder = tmp_path / "clips"
    folder.mkdir()
    generator = random.Random(0)
    corrupt = set(generator.sample(range(CLIPS), CORRUPT))
    for number in range(CLIPS):
        path = folder / (f"corrupt-{number:03}.mp4" if number in corrupt else f"{number:03}.mp4")
        shutil.copy(kinds[number % 10], path)
        if number in corrupt:
            data = path.read_bytes()
            path.write_bytes([data[: len(data) // 3], generator.randbytes(len(data)), b""][number % 3])
    return folder


def one_by_one(model: Any, processor: Any, clip: Path) -> str:
    """The answer of a plain call."""
    inputs = processor.apply_chat_template(
        messages(clip), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.slow
def test_killed_again_and_again_each_clip_is_answered_once_as_in_a_call_of_its_own(clips, tmp_path, processor):
    checkpoint = tmp_path / "checkpoint"
    model = load_talkative()
    model.save_pretrained(checkpoint)
    processor.save_pretrained(checkpoint)
    command = [sys.executable, "-m", "tests.stts_hf.inference.kill_predictions", str(clips), str(checkpoint)]
    run = subprocess.run([*command, "--kills", str(KILLS)], capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["killed"], found["status"]) == (KILLS, 1)
    assert found["went_on"] > KILLS / 2

    paths = sorted(clips.glob("*.mp4"))
    lines = [json.loads(line) for line in (clips / "answers.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == list(map(str, paths))
    rows = pyarrow.parquet.read_table(clips / "answers.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(map(str, paths))
    assert [row["id"] for row in rows if row["error"] is not None] == [str(p) for p in paths if "corrupt" in p.name]
    expected = {path: one_by_one(model, processor, path) for path in paths if "corrupt" not in path.name}
    assert {Path(row["id"]): row["answer"] for row in rows if row["error"] is None} == expected
    assert len(set(expected.values())) > 5


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
