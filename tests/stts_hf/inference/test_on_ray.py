"""What of a job on Ray is ours: what is done again and how often, where models run, what a worker says of its rows."""

import importlib.util
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from stts_hf.inference import on_ray
from stts_hf.inference.on_ray import RayPredictor, Slots, choose_slots, make_blocks
from stts_hf.inference.predicting import Predictor
from tests.checkpoints import load_of_one_answer
from tests.clips import write_clip

RAY = importlib.util.find_spec("ray")
GPUS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]


def row(number: int, prompt: str = "What moves?", video: str | None = None) -> dict[str, Any]:
    return {"id": f"{number}", "video": video or f"{number}.mp4", "prompt": prompt}


class Deadly(RayPredictor):
    """Answers at once, in place of Ray; a block ends at a row that kills. Keeps the blocks of each round."""

    def __init__(self, *killers: str, retries: int = 2, models: int = 1):
        super().__init__({"checkpoint": "none", "batch_size": 2}, retries=retries)
        self.slots = Slots(models, 1, 0, models)
        self.killers = killers
        self.rounds: list[list[list[str]]] = []

    def _answer(self, blocks, most_lost):
        self.rounds.append([[row["id"] for row in block] for block in blocks])
        for block in blocks:
            for asked in block:
                if asked["id"] in self.killers:
                    break
                yield {"id": asked["id"], "error": None}


def test_a_row_that_always_kills_ends_as_an_error_and_the_others_of_its_block_are_answered():
    predictor = Deadly("33", models=1)
    records = {record["id"]: record for record in predictor.predict(map(row, range(64)))}
    assert sorted(records, key=int) == [str(number) for number in range(64)]
    assert [name for name, record in records.items() if record["error"]] == ["33"]
    assert records["33"]["error"] == (
        "RayFailed: the process that was to answer it ended 3 times, at last with this row alone."
    )
    # 64 rows in 8 blocks; those of a block behind the row that killed, in batches; then each alone.
    assert [Counter(map(len, blocks)) for blocks in predictor.rounds] == [{8: 8}, {2: 3, 1: 1}, {1: 2}]


@pytest.mark.parametrize(
    ("retries", "errors", "said"), [(0, ["0", "1"], "ended once."), (1, ["0"], "ended 2 times, at last with this row")]
)
def test_the_limit_is_an_option(retries, errors, said):
    predictor = Deadly("0", retries=retries)
    records = list(predictor.predict(map(row, range(4))))
    assert [record["id"] for record in records if record["error"]] == errors
    assert said in records[-1]["error"]
    assert len(predictor.rounds) == retries + 1


def test_nothing_is_done_again_where_all_is_answered():
    predictor = Deadly()
    assert len(list(predictor.predict(map(row, range(10))))) == 10
    assert len(predictor.rounds) == 1


def test_ids_that_are_there_twice_are_refused():
    with pytest.raises(ValueError, match="ids of rows must differ"):
        list(Deadly().predict([row(1), row(1)]))


def test_prompts_about_one_video_stay_in_one_block():
    rows = [row(number, video=f"{number % 3}.mp4") for number in range(12)]
    assert [[one["id"] for one in block] for block in make_blocks(rows, 8)] == [
        ["0", "3", "6", "9", "1", "4", "7", "10"],
        ["2", "5", "8", "11"],
    ]
    assert [len(block) for block in make_blocks(rows, 3)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ((GPUS, "auto"), Slots(12, 4, 1, 12)),
        ((GPUS, "cpu"), Slots(88, 1, 0, 88)),
        ((GPUS, "cpu", None, 8), Slots(11, 8, 0, 11)),
        ((GPUS, "cuda", 20, 1, 0.5), Slots(20, 1, 0.5, 24)),
        ((GPUS, "auto", 3), Slots(3, 4, 1, 12)),
        (([{"CPU": 2.0, "GPU": 1.0}], "auto"), Slots(1, 2, 1, 1)),
        (([{"CPU": 12.0, "GPU": 1.0}], "auto", None, 1, 0.1), Slots(10, 1, 0.1, 10)),
        (([{"CPU": 2.0}], "auto"), Slots(2, 1, 0, 2)),
        (([{"CPU": 2.0}], "auto", 5), Slots(5, 1, 0, 2)),
    ],
)
def test_a_model_for_each_slot(arguments, slots):
    assert choose_slots(*arguments) == slots


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([{"CPU": 2.0}], "cuda"), "gpus 1 and cpus 1 of a model are more .* at most 0 GPUs and 2 CPUs"),
        (([{"CPU": 2.0}], "auto", None, None, 1), "at most 0 GPUs and 2 CPUs"),
        (([{"CPU": 2.0}, {"CPU": 4.0}], "auto", None, 5), "cpus 5 .* at most 0 GPUs and 4 CPUs"),
        ((GPUS, "auto", None, 17, 1), None),
        ((GPUS, "auto", None, None, 2), "gpus 2 must be from 0 to 1"),
        ((GPUS, "cpu", None, None, 1), "device cpu and 1 gpus exclude each other"),
        ((GPUS, "cuda", None, None, 0), "device cuda and 0 gpus exclude each other"),
        ((GPUS, "cuda:1"), "device cuda:1 must be auto, cpu or cuda on Ray"),
        (([], "auto"), "at most 0 GPUs and 0 CPUs"),
    ],
)
def test_slots_that_no_machine_has_are_refused(arguments, words):
    if words is None:
        assert choose_slots(*arguments).room == 3  # of the 64 CPUs
        return
    with pytest.raises(ValueError, match=words):
        choose_slots(*arguments)


@pytest.mark.skipif(RAY is None, reason="needs Ray")
def test_an_address_of_the_client_is_refused():
    with pytest.raises(ValueError, match=r"address ray://head:10001 is of a Ray client.*ray job submit"):
        RayPredictor({"checkpoint": "none"}, address="ray://head:10001").__enter__()


@pytest.mark.skipif(RAY is None, reason="needs Ray")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_an_address_nobody_listens_at_is_refused(address):
    with pytest.raises(ValueError, match=rf"address {address} cannot be reached: .* `ray start --head`"):
        RayPredictor({"checkpoint": "none"}, address=address).__enter__()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, processor) -> Path:
    """A tiny model that writes one answer, whatever it is asked."""
    folder = tmp_path_factory.mktemp("checkpoint")
    load_of_one_answer().save_pretrained(folder)
    processor.save_pretrained(folder)
    write_clip(folder / "clip.mp4", 5, fps=20)
    return folder


def work(worker: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a worker says of a block of rows."""
    table = pyarrow.table({"rows": [pickle.dumps(rows)]})
    return [json.loads(line) for batch in worker(table) for line in batch["record"]]


@pytest.fixture
def worker(checkpoint, monkeypatch):
    """A worker in this process; makes one of options."""
    monkeypatch.chdir(checkpoint)  # it changes the folder

    def make(driver: str = os.uname().nodename, **options: Any) -> Any:
        return on_ray._Worker({"checkpoint": str(checkpoint), "device": "cpu"} | options, os.getcwd(), driver)

    return make


def about_a_clip(number: int) -> list[dict[str, Any]]:
    return [row(place, video="clip.mp4") for place in range(number)]


def test_what_the_model_raises_is_the_error_of_the_row_it_raises_over(worker, monkeypatch):
    real = Predictor.predict

    def predict(self, rows):
        for record in real(self, rows):
            if any(row["id"] == "1" for row in rows):
                raise RuntimeError("no kernel for this")
            yield record

    monkeypatch.setattr(Predictor, "predict", predict)
    records = {record["id"]: record["error"] for record in work(worker(max_new_tokens=2), about_a_clip(3))}
    assert records == {"0": None, "1": "RuntimeError: no kernel for this", "2": None}


def test_a_process_whose_gpu_is_lost_ends(worker, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("CUDA error: device-side assert triggered")

    def end(status):
        raise SystemExit(status)

    made = worker(max_new_tokens=2)
    work(made, about_a_clip(1))
    monkeypatch.setattr(Predictor, "predict", broken)
    monkeypatch.setattr(on_ray.torch, "zeros", broken)
    monkeypatch.setattr(on_ray.os, "_exit", end)
    with pytest.raises(SystemExit):
        work(made, about_a_clip(2))


def test_a_video_that_another_machine_does_not_see_says_where_it_was_looked_for(worker):
    [here] = work(worker(), [row(1, video="clips/gone.mp4")])
    [there] = work(worker(driver="another"), [row(1, video="clips/gone.mp4")])
    place = f"Looked for on {os.uname().nodename}, in {os.getcwd()}: every machine must see the videos."
    assert here["error"] == "Row '1': videos: the file 'clips/gone.mp4' does not exist."
    assert there["error"] == f"{here['error']} {place}"


def test_a_checkpoint_that_a_machine_does_not_see_ends_the_job(worker):
    [said] = work(worker(checkpoint="/not/there"), about_a_clip(2))
    assert said["failed"].startswith("checkpoint /not/there cannot be loaded")
    assert f"(on the machine {os.uname().nodename}, in " in said["failed"]
