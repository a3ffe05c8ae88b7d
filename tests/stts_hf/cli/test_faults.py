"""A kill, a full disk, lost permissions and want of memory in the middle of each command that writes.

Nothing is lost, one line says what is wrong and what to do, and the same command then does all that it should.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from tests import faults
from tests.checkpoints import TINY, write_small_clip
from tests.faults import Ended, Fault, start
from tests.small_disk import mounted_disk
from tests.training_files import write_config, write_data

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="capabilities and limits on memory are Linux's"),
]
SAID = {
    "full": "(No|no) space (is )?left|File too large",
    "forbidden": "Permission denied",
    "no memory": "out of memory|does not fit into memory",
}


@pytest.fixture
def here(tmp_path) -> Iterator[Path]:
    """A folder on a small disk."""
    with mounted_disk(tmp_path / "here", 64_000_000):
        yield tmp_path / "here"


def fault_of(kind: str, folder: Path, room: int = 0) -> Fault:
    """room: what a full disk has left."""
    kinds: dict[str, Fault] = {
        "kill": faults.kill,
        "full": functools.partial(faults.fill, folder, room),
        "forbidden": functools.partial(faults.forbid, folder),
        "no memory": faults.exhaust,
    }
    return kinds[kind]


def check_end(ended: Ended, command: str, kind: str) -> None:
    """A kill ends a command silently, each other fault in one line, the last."""
    assert "Traceback" not in ended.err
    if kind == "kill":
        assert ended.status == -9
        return
    assert ended.status == 2, ended
    said = [line for line in ended.err.splitlines() if "error: " in line]
    assert said == ended.err.splitlines()[-1:]
    assert said[0].startswith(f"stts-hf {command}: error: ")
    assert re.search(SAID[kind], said[0]), said[0]


def check_done(ended: Ended) -> None:
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(("kind", "at"), [("kill", "PIL.ImageFile._save"), ("full", "stts_hf.cli.run.print_answer")])
def test_run(here, kind, at):
    write_small_clip(here)
    (here / "sheet.png").write_bytes(b"an earlier picture")
    command = ["run", "clip.mp4", "What moves?", "--checkpoint", TINY, "--output", "sheet.png", "--max-new-tokens", "3"]
    ended = start(command, here, fault_of(kind, here, room=4096), at)
    check_end(ended, "run", kind)
    assert "answer:" in ended.out
    assert (here / "sheet.png").read_bytes() == b"an earlier picture"
    faults.mend(here)
    check_done(start(command, here))
    with Image.open(here / "sheet.png") as image:
        image.load()
    assert sorted(os.listdir(here)) == ["clip.mp4", "sheet.png"]


WRITE = "stts_hf.inference.answers_file.AnswersFile.write"
FINISH = "stts_hf.inference.answers_file.AnswersFile.finish"
LOAD = "stts_hf.inference.predictor.load_model"
PARQUET = "stts_hf.cli.predict.write_parquet"
PREDICT = [("kill", WRITE, 2), ("full", PARQUET, 1), ("forbidden", FINISH, 1), ("no memory", LOAD, 1)]


def predict(here: Path, output: str, *more: str) -> list[object]:
    """The command, about two videos, one after the other."""
    for name in ("a.mp4", "b.mp4"):
        write_small_clip(here).rename(here / name)
    options = ["--max-new-tokens", "3", "--batch-size", "1", "--workers", "0", *more]
    return ["predict", "a.mp4", "b.mp4", "--prompt", "What?", "--checkpoint", TINY, "--output", output, *options]


def lines(here: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize(("kind", "at", "call"), PREDICT, ids=lambda value: str(value)[:30])
def test_predict(here, kind, at, call):
    command = predict(here, "out.parquet")
    check_end(start(command, here, fault_of(kind, here), at, call), "predict", kind)
    there = lines(here)
    assert len(there) == {WRITE: call - 1, FINISH: 2, PARQUET: 2}.get(at, 0)
    assert not (here / "out.parquet").exists()
    faults.mend(here)
    check_done(start(command, here))
    assert {name: lines(here)[name] for name in there} == there
    assert pyarrow.parquet.read_table(here / "out.parquet").to_pylist() == list(lines(here).values())
    left = [".out.jsonl.lock", "a.mp4", "b.mp4", "out.jsonl", "out.parquet", "out.summary.json"]
    assert sorted(os.listdir(here)) == left


TRAIN = [
    ("kill", "transformers.Trainer._save_optimizer_and_scheduler", 2),
    ("full", "stts_hf.training.run.save", 1),
    ("no memory", "transformers.Trainer.training_step", 2),
]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> tuple[Path, bytes]:
    """A configuration of two steps, each saved, and the weights of a run that nothing befell."""
    folder = tmp_path_factory.mktemp("training")
    config = write_config(folder, write_data(folder / "data"), Path("out"), more="save_steps: 1\n")
    check_done(start(["train", config, "--max_steps=2"], folder))
    return config, (folder / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "at", "call"), TRAIN, ids=lambda value: str(value)[-30:])
def test_train(here, training, kind, at, call):
    config, weights = training
    command = ["train", config, "--max_steps=2"]
    check_end(start(command, here, fault_of(kind, here, room=1_000_000), at, call), "train", kind)
    whole = [f"checkpoint-{step}" for step in range(1, 2 if call == 2 else 3)]
    assert sorted(path.parent.name for path in (here / "out").glob("checkpoint-*/trainer_state.json")) == whole
    assert not (here / "out" / "config.json").exists()
    faults.mend(here)
    check_done(start([*command, "--resume"], here))
    assert (here / "out" / "model.safetensors").read_bytes() == weights
    assert not [path for path in (here / "out").iterdir() if path.name.startswith((".", "_"))]
