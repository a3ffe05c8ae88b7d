"""A job on Ray itself: the answers are those of `Predictor`, whichever process dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stts_hf.inference.on_ray import RayFailed, Slots, choose_slots, connect, predict_on_ray
from stts_hf.inference.predictor import Predictor
from tests.checkpoints import load_talkative
from tests.clips import write_clip
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
ONE = Slots(models=1, cpus=1, gpus=0)
WATCHES_OPENED_FILES = """
import os, sys, time

def look(event, arguments):
    if event == "open" and str(arguments[0]).endswith("/deadly.mp4"):
        os.abort()
    if event == "open" and str(arguments[0]).endswith("/held.mp4"):
        while os.path.exists(f"{arguments[0]}.wait"):
            time.sleep(0.05)

sys.addaudithook(look)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, processor) -> Path:
    """Its answers differ from prompt to prompt."""
    folder = tmp_path_factory.mktemp("checkpoint")
    load_talkative().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict[str, Any]]:
    """Two prompts about each of ten clips, one that is corrupt and one that is not there; the last can be held."""
    folder = tmp_path_factory.mktemp("clips")
    clips = [write_clip(folder / f"{number}.mp4", 5 + 4 * number, fps=20) for number in range(9)]
    (folder / "corrupt.mp4").write_bytes(b"no video\n" * 100)
    clips += [folder / "corrupt.mp4", folder / "gone.mp4", write_clip(folder / "held.mp4", 40, fps=20)]
    return [
        {"id": f"{clip.stem}-{word}", "video": str(clip), "prompt": f"{word}?"}
        for clip in clips
        for word in ("What", "Where")
    ]


@pytest.fixture(scope="module")
def options(checkpoint) -> dict[str, Any]:
    # With `num_workers=0` videos are opened by the process with the model.
    return {"checkpoint": str(checkpoint), "batch_size": 2, "max_new_tokens": 12, "num_workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def expected(options, rows) -> dict[str, dict[str, Any]]:
    return by_id(Predictor(**options).predict(rows))


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """A Ray of two CPUs, which this process is connected to."""
    ray = pytest.importorskip("ray")

    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(WATCHES_OPENED_FILES)
    with pytest.MonkeyPatch.context() as patch:
        # Python imports `sitecustomize` as it starts: so does every worker, of this process' job and of a command's.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [folder, REPOSITORY / "src", REPOSITORY])))
        context = ray.init(
            "local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@contextmanager
def held(rows: list[dict[str, Any]]) -> Iterator[None]:
    """Who opens the last video, waits until the `with` block ends: the job cannot end before."""
    wait = Path(rows[-1]["video"] + ".wait")
    wait.touch()
    try:
        yield
    finally:
        wait.unlink()


def by_id(records: Any) -> dict[str, dict[str, Any]]:
    """Records without their seconds; none may be there twice."""
    records = list(records)
    assert len({record["id"] for record in records}) == len(records)
    return {record["id"]: record | {"seconds": 0} for record in records}


def workers() -> list[int]:
    """The processes with a model, by what Ray calls them."""
    names = ((path, path.joinpath("cmdline")) for path in Path("/proc").glob("[0-9]*"))
    return [int(path.name) for path, name in names if name.exists() and b"ray::MapWorker" in name.read_bytes()]


def test_the_answers_are_those_of_a_predictor(address, options, rows, expected):
    with connect() as machines:
        slots = choose_slots(machines, "cpu")
        assert slots.models == 2
        assert by_id(predict_on_ray(rows, options, slots)) == expected
    assert len({record["answer"] for record in expected.values()}) > 5


def test_rows_of_a_process_that_is_killed_are_answered_once_by_another(address, options, rows, expected):
    records = predict_on_ray(rows, options, ONE)
    with held(rows):
        first = [next(records) for _ in range(5)]
        [worker] = workers()
        os.kill(worker, signal.SIGKILL)
    assert by_id([*first, *records]) == expected


def test_a_row_that_always_kills_is_an_error_and_the_others_are_answered(address, options, rows, expected):
    video = Path(rows[0]["video"])
    deadly = {"id": "deadly", "video": str(shutil.copy(video, video.with_name("deadly.mp4"))), "prompt": "What?"}
    asked = rows[:4]
    found = by_id(predict_on_ray([*asked[:2], deadly, *asked[2:]], options, ONE, retries=1))
    assert found.pop("deadly")["error"].startswith("RayFailed: ")
    assert found == {row["id"]: expected[row["id"]] for row in asked}


def test_a_checkpoint_that_no_machine_sees_ends_the_job(address, rows):
    with pytest.raises(RayFailed, match="checkpoint /not/there cannot be loaded"):
        list(predict_on_ray(rows, {"checkpoint": "/not/there"}, ONE))


def test_a_command_that_is_killed_goes_on(address, checkpoint, rows, expected, tmp_path):
    output = tmp_path / "answers.jsonl"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "stts_hf.cli.main", "predict", "rows.jsonl", "--checkpoint", str(checkpoint)]
    command += ["--output", str(output), "--max-new-tokens", "12", "--batch-size", "2", "--workers", "0"]
    command += ["--engine", "ray", "--address", address, "--models", "1", "--device", "cpu"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    with held(rows):
        killed = start()
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert killed.poll() is None, killed.communicate()[1]
            time.sleep(0.01)
        killed.kill()
        killed.communicate()
    done = output.read_bytes().count(b"\n")
    assert done < len(rows)
    second = start()
    said = second.communicate(timeout=600)[1]
    assert second.returncode == 1, said  # some rows have an error
    assert f" of {len(rows)} rows are answered in {output} already" in said
    assert by_id(map(json.loads, output.read_text().splitlines())) == expected
