"""`make gpu`: its parts, its page, and the whole of it on a CPU."""

import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch

from examples.gpu import __main__ as gpu
from examples.gpu.backbones import lacking, released_workloads
from examples.gpu.checks import GOES_ON, Check, passed_earlier, relative_error, run_check, run_checks
from examples.gpu.page import PAPER, left_out, page, wrong
from examples.gpu.runner import Outcome, Part
from stts_hf.benchmark.presets import PRESETS
from stts_hf.benchmark.report import PAPER_SPEED_UPS
from stts_hf.checkpoints.families import OWN
from tests.conftest import REPOSITORY

RATIOS = (0.0, 0.3, 0.4, 0.5, 0.7)


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_every_part_is_a_module_with_a_limit_under_nine_minutes(size):
    parts = gpu.list_parts("cuda", size)
    assert [part.letter for part in parts] == sorted(part.letter for part in parts)
    for part in parts:
        assert part.limit < 9 * 60
        assert importlib.util.find_spec(part.command[2]) is not None


@pytest.mark.parametrize(("memory", "geometry"), [(80e9, "molmo2-4b-short"), (140e9, "molmo2-4b")])
def test_the_paper_s_shapes_are_measured(memory, geometry):
    from examples.gpu.shapes import workloads

    prompts, training = (workloads(name, "full", memory) for name in ("molmo2", "molmo2-training"))
    for found, mode in ((prompts, "inference"), (training, "training")):
        assert [(it.mode, it.frames * it.batch, it.ratios) for it in found] == [(mode, n, RATIOS) for n in (128, 256)]
    assert {it.geometry for it in prompts} == {"molmo2-4b"}
    assert {it.geometry for it in training} == {geometry}
    assert {it.geometry for it in workloads("qwen", "full", memory)} == {"qwen3-vl-4b", "qwen3-vl-4b-low"}
    assert all(it in PRESETS["tiny"].workloads or it.batch == 1 for it in workloads("molmo2", "tiny", 0))


@pytest.mark.slow
def test_every_backbone_is_checked_and_its_largest_released_size_that_fits_is_measured():
    names = {part.name for part in gpu.list_parts("cuda", "full")}
    assert {f"paths-{family.config.native.model_type}" for family in OWN.values()} <= names
    released = {name.removeprefix("released-") for name in names if name.startswith("released-")}
    found = {name: [it.geometry for it in released_workloads(name, "full", 80e9)] for name in released}
    expected = {
        "qwen3_vl_moe": ["stts-qwen3-vl-30b-a3b"],
        "qwen3_5": ["stts-qwen3-5-9b", "stts-qwen3-5-4b"],
        "qwen3_5_moe": [],
        "smolvlm": ["smolvlm2-500m", "smolvlm2-500m"],
    }
    assert found == {name: sizes for name, sizes in expected.items() if not lacking(name)}
    assert [it.geometry for it in released_workloads("qwen3_5_moe", "full", 143e9)] == ["stts-qwen3-5-35b-a3b"]


def test_the_numbers_of_the_paper_are_those_of_the_benchmark():
    assert {key: ratios[0.5] for key, ratios in PAPER_SPEED_UPS.items()} == PAPER


def cell(mode: str, batch: int, frames: int, seconds: float, status: str = "ok") -> dict:
    def variant(ratio: float | None, taken: float, flops: int) -> dict:
        found = {"pruning_ratio": ratio, "status": "ok", "peak_memory": 2**30}
        return found | {"stages": {"total": {"seconds": [taken], "flops": flops}}}

    workload = {"geometry": "molmo2-4b", "mode": mode, "batch": batch, "frames": frames, "selector": "scorer"}
    stock = variant(None, 3.0, 170) | {"status": status}
    return {"title": "title", "workload": workload, "variants": [stock, variant(0.5, seconds, 100)]}


def test_the_page_puts_us_beside_the_paper_whatever_came_out():
    parts = [Part(name, "b", "", [], 1.0) for name in ("molmo2", "molmo2-training", "paths")]
    results: dict[str, dict[str, Any]] = {
        "molmo2": {"finished": True, "cells": [cell("inference", 2, 64, 2.0), cell("inference", 1, 256, 4.0)]},
        "molmo2-training": {"cells": [cell("training", 2, 64, 2.0, status="out of memory")]},
    }
    outcomes = [Outcome(parts[0], "ok", 5.0), Outcome(parts[1], "unfinished", 5.0, "stopped after 5 s")]
    outcomes.append(Outcome(parts[2], "failed", 1.0, "ValueError: x"))
    text = page(outcomes, results, "")
    assert "| inference, 128 frames | 1.61x | 1.50x | 1.70x | 88% | 1.0 / 1.0 | title |" in text
    assert "| inference, 256 frames | 2.22x | 0.75x |" in text
    assert "| training, 128 frames | 1.62x | not measured |  |  | - / 1.0 | title |" in text
    assert "| training, 256 frames | 2.25x | not measured |" in text
    assert wrong(outcomes, results) == [
        "molmo2-training: unfinished (stopped after 5 s)",
        "paths: failed (ValueError: x)",
    ]


def test_a_check_that_differs_or_raises_is_a_row_of_its_own():
    def fail() -> tuple[float, float]:
        raise RuntimeError("no\nkernel")

    def row(run) -> dict:
        return run_check(Check("one", torch.float32, run, (0.1, 0.2)), torch.device("cpu"))

    assert row(lambda: (0.05, 0.15))["state"] == "ok"
    assert row(lambda: (0.15, None))["state"] == "differs"
    assert row(lambda: (0.05, 0.25))["state"] == "differs"
    assert re.fullmatch(r"RuntimeError, test_gpu.py:\d+: no kernel", row(fail)["reason"])
    assert relative_error(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")


@pytest.mark.slow
def test_a_call_goes_on_where_the_time_of_the_last_one_was_up(tmp_path):
    ran: list[str] = []

    def check(name: str, error: float, stop: bool = False) -> Check:
        def run() -> tuple[float, None]:
            ran.append(name)
            if stop:
                raise KeyboardInterrupt
            return error, None

        return Check(name, torch.float32, run, (0.1, 0.1))

    def call(about: dict, stop: bool = False) -> None:
        rows = (check("right", 0.0), check("wrong", 1.0), check("last", 0.0, stop))
        run_checks(rows, torch.device("cpu"), tmp_path, {"title": "a", "device": "b", "versions": {}, **about})

    with pytest.raises(KeyboardInterrupt):
        call({}, stop=True)
    with pytest.raises(KeyboardInterrupt):
        call({"device": "another"}, stop=True)
    with pytest.raises(KeyboardInterrupt):
        call({}, stop=True)
    assert ran == ["right", "wrong", "last"] * 3
    ran.clear()
    call({})
    assert ran == ["wrong", "last"]
    found = json.loads((tmp_path / "result.json").read_text())["checks"]
    assert [row["state"] for row in found] == ["ok", "differs", "ok"]
    assert not (tmp_path / "unfinished.json").exists()


@pytest.mark.parametrize(("now", "kept"), [({"torch": "2", "flash-attn": "2"}, True), ({"torch": "3"}, False)])
def test_rows_that_were_right_stay_where_a_package_came_but_not_where_one_changed(now, kept, tmp_path):
    about = {"title": "a", "device": "b", "versions": {"torch": "2"}}
    row = {"name": "one", "dtype": "float32", "state": "ok"}
    (tmp_path / "unfinished.json").write_text(json.dumps({**about, "checks": [row]}))
    assert passed_earlier(tmp_path, about | {"versions": now}) == ({("one", "float32"): row} if kept else {})


def test_after_a_row_that_ended_the_context_a_new_process_goes_on_with_the_next(tmp_path, monkeypatch):
    ran: list[str] = []

    def run_all() -> None:
        def run(name: str) -> tuple[float, None]:
            ran.append(name)
            if name == "asserts":
                raise RuntimeError("CUDA error: device-side assert triggered")
            return 0.0, None

        rows = [Check(name, torch.float32, partial(run, name), (0.1, 0.1)) for name in ("right", "asserts", "last")]
        run_checks(rows, torch.device("cpu"), tmp_path, {"title": "a", "device": "b", "versions": {}})

    def begin_anew(*command: object) -> None:
        assert command == (sys.executable, sys.orig_argv)
        raise SystemExit

    monkeypatch.setattr("os.execv", begin_anew)
    monkeypatch.setattr("examples.gpu.checks.has_ended", lambda device: ran[-1] == "asserts")
    monkeypatch.setenv(GOES_ON, "")
    monkeypatch.delenv(GOES_ON)  # remembered, so that what the code sets is taken away again
    with pytest.raises(SystemExit):
        run_all()
    run_all()
    assert ran == ["right", "asserts", "last"]
    found = json.loads((tmp_path / "result.json").read_text())["checks"]
    assert [row["state"] for row in found] == ["ok", "failed", "ok"]


@pytest.mark.slow
def test_the_reference_of_a_recurrent_model_needs_no_kernels(monkeypatch):
    from examples.gpu import paths

    reference = paths.make_reference("qwen3_5", paths.workload_of("qwen3_5", "tiny"))
    native = sys.modules[type(reference.model.model.language_model).__module__]

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    for name in paths.KERNELS:
        kernel = functools.wraps(inspect.unwrap(getattr(native, name)))(partial(refuse))
        monkeypatch.setattr(native, name, kernel)
    with pytest.raises(ValueError, match="Triton"):
        paths.compute(reference.model, reference.inputs)
    assert reference.computed[1]
    assert reference.tokens.shape[1] == paths.NEW_TOKENS


def test_carried_packages_stay_on_the_path_of_parts():
    code = "from examples.gpu.__main__ import ENVIRONMENT; print(ENVIRONMENT['PYTHONPATH'])"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": "src:carried"}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert ran.stdout.strip().split(":") == [str(REPOSITORY / "src"), str(REPOSITORY), "src", "carried"]


def test_a_path_that_computes_something_else_is_noticed():
    """Other blocks dropped: far outside of what a path may have in any dtype."""
    from examples.gpu import paths

    cpu = torch.device("cpu")
    reference = paths.make_reference("molmo2", paths.workload_of("molmo2", "tiny"))
    forward, backward = paths.train_errors(reference, cpu, torch.float32, paths.with_checkpointing)
    assert forward <= 1e-4
    assert backward is not None
    assert backward <= 1e-3
    reference.ranking = reference.ranking.flip(0)  # `computed` stays
    forward, backward = paths.train_errors(reference, cpu, torch.float32)
    assert forward > 2 * paths.TOLERANCES[torch.bfloat16][0]
    assert backward is not None
    assert backward > 2 * paths.TOLERANCES[torch.bfloat16][1]


@pytest.mark.parametrize("options", [["--device", "cuda"], ["--device", "cpu"], ["--size", "tiny", "--parts", "none"]])
def test_what_cannot_be_is_refused(options, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(options)
    assert re.search("finds no CUDA device|SIZE=tiny|is none of kernels, paths-molmo2", capsys.readouterr().err)


def test_results_of_another_gpu_are_not_taken_for_this_one_s(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda"])  # where results are committed
    assert "holds results of NVIDIA H100 80GB HBM3, this is another GPU: RESULTS=" in capsys.readouterr().err


# The study and other backbones' paths take minutes more; CI has the study's miniature, and tests of every backbone.
PARTS = [part.name for part in gpu.list_parts("cpu", "tiny")]
SHORT = [name for name in PARTS if not re.search("study|paths-(?!molmo2$)|released-", name)]


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHORT, pytest.param(PARTS, marks=pytest.mark.study)], ids=["short", "all"])
def test_all_of_it_runs_on_a_cpu(names, tmp_path):
    """In some two minutes of two quiet cores; nothing is left out but kernels, and vLLM where it is not installed."""
    command = ["make", "gpu", "DEVICE=cpu", "SIZE=tiny", "INSTALL=0", "VENV=.none", f"PYTHON={sys.executable}"]
    command.append(f"PARTS={' '.join(names)}")
    started = time.monotonic()
    ran = subprocess.run([*command, f"RESULTS={tmp_path}"], cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    print(f"{time.monotonic() - started:.0f} s\n", ran.stdout, ran.stderr)
    assert ran.returncode == 0
    assert "## Left out" in ran.stdout
    parts = [part for part in gpu.list_parts("cpu", "tiny") if part.name in names]
    found = {part.name for part in parts if (tmp_path / f"gpu-{part.name}" / "result.json").exists()}
    assert {part.name for part in parts if part.name not in found and not part.lacks} == set()
    results = {name: json.loads((tmp_path / f"gpu-{name}" / "result.json").read_text()) for name in found}
    for line in left_out([], results):
        assert re.search("flash_attention|flex_attention|torch_varlen|flash-linear-attention", line)
    assert {part.name for part in parts if part.lacks} <= {"molmo2-flex", "vllm"}
