"""The model `stts` in the real lmms-eval, on a local task: answers and scores of `stts-hf eval`, to the question."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stts_hf import STTSProcessor
from stts_hf.evaluation.evaluate import evaluate
from tests.checkpoints import TINY, load_talkative, load_tiny
from tests.clips import write_clip
from tests.conftest import REPOSITORY
from tests.training_files import write_rows

lmms_eval = pytest.importorskip("lmms_eval", reason="needs lmms-eval: `make test-eval`")

from lmms_eval.evaluator import simple_evaluate  # noqa: E402
from lmms_eval.tasks import TaskManager  # noqa: E402

TASK = REPOSITORY / "examples" / "eval" / "local"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    load_talkative().save_pretrained(folder)
    STTSProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory, checkpoint) -> Path:
    """Questions about clips, a picture and nothing; some of the answers are what the model says."""
    folder = tmp_path_factory.mktemp("rows")
    clips = [write_clip(folder / f"{n}.mp4", n, fps=10).name for n in (5, 10, 20)]
    Image.new("RGB", (160, 90), (200, 10, 10)).save(folder / "wide.png")
    options = ["left", "right", "up"]
    rows: list[dict[str, Any]] = [
        {"question": f"Where does ball {n} go, and how often?", "options": options, "answer": "up", "videos": [clip]}
        for clip in clips
        for n in range(3)
    ]
    rows += [{"question": f"Which colour is thing {n}?", "answer": "red", "images": ["wide.png"]} for n in range(2)]
    rows += [{"question": f"How many are {n}?", "answer": "three", "options": None} for n in range(2)]
    rows += [{"question": f"What moves in clip {clip}?", "answer": "x", "videos": [clip]} for clip in clips]
    rows = [{"id": f"q{number}", "type": "t", **row} for number, row in enumerate(rows)]
    said = {record["id"]: record["written"] for record in run_evaluate(checkpoint, rows, folder)}
    for row in rows[1::2]:
        if row.get("options"):
            row["options"] = [*options[:2], said[row["id"]]]
            row["answer"] = 2
        else:
            row["answer"] = said[row["id"]]
    for row in rows:
        row["answer"] = str(row["answer"])
    return write_rows(folder, rows, "rows.jsonl")


def run_evaluate(checkpoint: Path, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    model, processor = load_tiny(checkpoint), STTSProcessor.from_pretrained(checkpoint)
    return list(
        evaluate(
            model,
            processor,
            [row | {"media_root": str(folder)} for row in rows],
            pruning_ratio=0.5,
            batch_size=1,
            processing={"num_frames": 3},
            max_new_tokens=4,
        )
    )


@pytest.fixture(scope="module")
def task(rows, tmp_path_factory) -> Path:
    """The shipped task, with the paths of these rows in it."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "utils.py").write_bytes((TASK / "utils.py").read_bytes())
    text = (TASK / "stts_local.yaml").read_text().replace("data/test.jsonl", str(rows))
    text = text.replace("folder: data", f"folder: {rows.parent}").replace("max_new_tokens: 16", "max_new_tokens: 4")
    (folder / "stts_local.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def manager(task) -> TaskManager:
    return TaskManager(include_path=str(task))


@pytest.fixture(scope="module")
def results(checkpoint, manager) -> dict[str, Any]:
    return simple_evaluate(
        model="stts",
        model_args=f"pretrained={checkpoint},pruning_ratio=0.5,num_frames=3",
        tasks=["stts_local"],
        task_manager=manager,
        batch_size=4,
        device="cpu",
        log_samples=True,
    )


def test_answers_and_scores_are_those_of_stts_hf_eval(results, checkpoint, rows):
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    ours = {record["id"]: record for record in run_evaluate(checkpoint, given, rows.parent)}
    theirs = {sample["doc"]["id"]: sample for sample in results["samples"]["stts_local"]}
    assert theirs.keys() == ours.keys() == {row["id"] for row in given}
    for name, record in ours.items():
        assert theirs[name]["filtered_resps"][0].strip() == record["written"]
        assert bool(theirs[name]["accuracy"]) == record["right"]
        assert bool(theirs[name]["no_option"]) == record["no_option"]
    right = [record["right"] for record in ours.values()]
    assert 0 < sum(right) < len(right)
    assert results["results"]["stts_local"]["accuracy,none"] == pytest.approx(sum(right) / len(right))
