"""Kills during a save, and saves at the same time: never a folder that loads wrongly."""

import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

import pytest

from stts_hf import STTSProcessor
from tests.checkpoints import load_tiny
from tests.saver import save

VERSIONS = {"old": 1, "new": 2}


def state_of(folder: Path, part: str = "model") -> str:
    """Which version a folder loads, all of it, or "refused" where loading fails; anything else is a lie."""
    if part == "processor":
        try:
            processor = STTSProcessor.from_pretrained(folder)
        except (OSError, ValueError):
            return "refused"
        tokenizer = processor.tokenizer
        values = {processor.video_processor.num_frames, int(processor.chat_template), tokenizer.model_max_length}
        values |= {value for value in VERSIONS.values() if f"<value {value}>" in tokenizer.get_vocab()}
        assert len(values) == 1, f"a mixture of settings loads from {folder}: {values}"
        return next(name for name, value in VERSIONS.items() if value in values)
    try:
        weights = load_tiny(folder).state_dict()
    except (OSError, ValueError):
        return "refused"
    found = [name for name, value in VERSIONS.items() if all(bool((w == value).all()) for w in weights.values())]
    assert len(found) == 1, f"a mixture of weights loads from {folder}"
    return found[0]


@pytest.fixture(scope="module")
def saver():
    """Starts processes that save a version; forked from one that has imported everything, so that they start at once"""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.saver"])

    def start(folder: Path, version: str, shards: str | None, die_after: int | None = None):
        process = context.Process(target=save, args=(folder, VERSIONS[version], shards, die_after))
        process.start()
        return process

    return start


def finish(process) -> int | None:
    process.join(timeout=300)
    return process.exitcode


@pytest.mark.parametrize(
    ("part", "shards", "times"),
    [("model", "50GB", 7), ("model", "20KB", 7), ("processor", None, 7)],
    ids=["model", "model-in-shards", "processor"],
)
def test_a_kill_at_any_moment_never_leaves_a_folder_that_loads_wrongly(tmp_path, saver, part, shards, times):
    assert finish(saver(tmp_path, "new", shards)) == 0
    started = time.perf_counter()
    assert finish(saver(tmp_path, "old", shards)) == 0
    duration = time.perf_counter() - started
    moments = random.Random(0)
    seen = []
    for moment in range(times):
        process = saver(tmp_path, "new", shards)
        time.sleep((moment + moments.random()) / times * duration)
        process.kill()
        finish(process)
        seen.append(state_of(tmp_path, part))
        if seen[-1] != "old":
            assert finish(saver(tmp_path, "old", shards)) == 0
    assert "old" in seen  # or the moments were too late to prove anything


@pytest.mark.parametrize(
    ("part", "moved"),
    [("model", 0), ("model", 1), ("model", 10), ("model", 25), ("processor", 0), ("processor", 1), ("processor", 15)],
)
def test_a_kill_while_files_are_exchanged_leaves_a_folder_that_does_not_load(tmp_path, saver, part, moved):
    shards = "20KB" if part == "model" else None
    assert finish(saver(tmp_path, "old", shards)) == 0
    assert state_of(tmp_path, part) == "old"
    assert finish(saver(tmp_path, "new", shards, moved)) == 9
    assert state_of(tmp_path, part) == "refused"
    assert finish(saver(tmp_path, "new", shards)) == 0
    assert state_of(tmp_path, part) == "new"
    assert not list(tmp_path.glob("_saving*"))


def test_processes_that_save_into_one_folder_at_once_leave_one_version(tmp_path, saver):
    for _ in range(3):
        processes = [saver(tmp_path, version, shards) for version in VERSIONS for shards in ("50GB", "20KB")]
        assert [finish(process) for process in processes] == [0] * len(processes)
        assert state_of(tmp_path) in VERSIONS
    assert not list(tmp_path.glob("_saving*"))


def test_a_save_clears_only_what_dead_processes_left(tmp_path, saver):
    dead = saver(tmp_path / "elsewhere", "old", "50GB")
    finish(dead)
    prefix = f"_saving-config-{socket.gethostname()}-"
    stages = {f"{prefix}{dead.pid}-aa", f"{prefix}{os.getppid()}-bb", f"_saving-config-x{prefix}{dead.pid}-cc"}
    for name in stages:
        (tmp_path / name).mkdir()
    load_tiny().save_pretrained(tmp_path)
    assert {entry.name for entry in tmp_path.glob("_saving*")} == stages - {f"{prefix}{dead.pid}-aa"}
