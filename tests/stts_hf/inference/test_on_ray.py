"""What of a job on Ray is ours: which rows are asked again, where models run, what a worker says of its rows."""

import importlib.util
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from stts_hf.inference import on_ray
from stts_hf.inference.on_ray import Slots, choose_slots, connect, predict_on_ray
from stts_hf.inference.predictor import Predictor
from tests.clips import write_clip

RAY = importlib.util.find_spec("ray")
GPUS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]


def row(number: int, video: str | None = None) -> dict[str, Any]:
    return {"id": f"{number}", "video": video or f"{number:02}.mp4", "prompt": "What moves?"}


@pytest.fixture
def ask(monkeypatch):
    """Asks rows about which nothing is computed, in batches of two, where one ends its process; returns errors by id
    and the sizes of the blocks of each round."""

    def ask(rows: list[dict[str, Any]], killer: str | None = None, retries: int = 2):
        rounds: list[list[int]] = []

        def answer(blocks, *arguments):
            rounds.append([len(block) for block in blocks])
            for block in blocks:
                for asked in block:
                    if asked["id"] == killer:
                        break
                    yield {"id": asked["id"], "error": None}

        monkeypatch.setattr(on_ray, "_answer", answer)
        records = list(predict_on_ray(rows, {"batch_size": 2}, Slots(1, 1, 0), retries))
        assert sorted(record["id"] for record in records) == sorted(asked["id"] for asked in rows)
        return {record["id"]: record["error"] for record in records if record["error"]}, rounds

    return ask


def test_a_row_that_always_kills_ends_as_an_error_and_the_others_of_its_block_are_answered(ask):
    errors, rounds = ask([row(number) for number in range(64)], killer="33")
    assert errors == {"33": "RayFailed: the process that was to answer it ended, in each of 3 rounds."}
    # 64 rows in 8 blocks; those of a block behind the row that killed, in batches; then each alone.
    assert rounds == [[8] * 8, [2, 2, 2, 1], [1, 1]]


@pytest.mark.parametrize(("retries", "errors"), [(0, {"0", "1"}), (1, {"0"})])
def test_the_limit_is_an_option(ask, retries, errors):
    found, rounds = ask([row(number) for number in range(4)], killer="0", retries=retries)
    assert found.keys() == errors
    assert len(rounds) == retries + 1


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ((GPUS, "auto"), Slots(12, 4, 1)),
        ((GPUS, "cpu", None, 8), Slots(11, 8, 0)),
        ((GPUS, "cuda", 20, 1, 0.5), Slots(20, 1, 0.5)),
        (([{"CPU": 12.0, "GPU": 1.0}], "auto", None, 1, 0.1), Slots(10, 1, 0.1)),
        (([{"CPU": 2.0}], "auto"), Slots(2, 1, 0)),
    ],
)
def test_a_model_for_each_slot(arguments, slots):
    assert choose_slots(*arguments) == slots


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([{"CPU": 2.0}], "cuda"), "gpus 1 and cpus 1 per model are more"),
        (([{"CPU": 2.0}, {"CPU": 4.0}], "auto", None, 5), "cpus 5 "),
        ((GPUS, "cpu", None, None, 1), "gpus 1 does not fit device cpu"),
        ((GPUS, "cuda", None, None, 0), "gpus 0 does not fit device cuda"),
        ((GPUS, "cuda:1"), "device cuda:1"),
        (([], "auto"), "more than any machine"),
    ],
)
def test_slots_that_no_machine_has_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        choose_slots(*arguments)


@pytest.mark.skipif(RAY is None, reason="needs Ray")
@pytest.mark.parametrize("address", [pytest.param("ray://127.0.0.1:1", marks=pytest.mark.slow), "nowhere"])
def test_an_address_without_ray_is_refused(address):
    with pytest.raises(ValueError, match=rf"address {address} cannot be used: .* `ray start --head`"), connect(address):
        pass


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    """Beside the checkpoint a clip."""
    write_clip(checkpoint / "clip.mp4", 5, fps=20)
    return checkpoint


@pytest.fixture
def work(folder, monkeypatch):
    """What a worker in this process says of a block of rows."""
    monkeypatch.chdir(folder)

    def work(rows: list[dict[str, Any]], driver: str = os.uname().nodename, checkpoint: str = "."):
        options = {"checkpoint": checkpoint, "device": "cpu", "max_new_tokens": 2}
        worker: Any = on_ray._Worker(options, str(folder), driver)
        table = pyarrow.table({"rows": [pickle.dumps(rows)]})
        return [json.loads(line) for batch in worker(table) for line in batch["record"]]

    return work


def test_what_the_model_raises_is_the_error_of_the_row_it_raises_over(work, monkeypatch):
    real = Predictor.predict

    def predict(self, rows):
        for record in real(self, rows):
            if any(row["id"] == "1" for row in rows):
                raise RuntimeError("no kernel for this")
            yield record

    monkeypatch.setattr(Predictor, "predict", predict)
    records = {record["id"]: record["error"] for record in work([row(number, "clip.mp4") for number in range(3)])}
    assert records == {"0": None, "1": "RuntimeError: no kernel for this", "2": None}


def test_a_process_whose_gpu_is_lost_ends(work, monkeypatch):
    def broken(*arguments, **options):
        monkeypatch.setattr(on_ray.torch, "zeros", broken)
        raise RuntimeError("CUDA error: device-side assert triggered")

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(Predictor, "predict", broken)
    monkeypatch.setattr(on_ray.os, "_exit", end)
    with pytest.raises(SystemExit):
        work([row(1, "clip.mp4")])


def test_an_error_on_another_machine_names_it(work, folder):
    [here] = work([row(1, "gone.mp4")])
    [there] = work([row(1, "gone.mp4")], driver="another")
    assert there["error"] == f"{here['error']} (on the machine {os.uname().nodename}, in {folder})"


def test_a_checkpoint_that_a_machine_does_not_see_ends_the_job(work):
    [said] = work([row(1, "clip.mp4")], checkpoint="/not/there")
    assert said["failed"].startswith("checkpoint /not/there cannot be loaded")
