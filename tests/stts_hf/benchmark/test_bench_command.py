"""`stts-hf bench` from the command line: one whole run of the tiny preset, and everything it refuses."""

import json
import os
import re

import pytest
import torch

from stts_hf.benchmark.measure import check_runnable
from stts_hf.benchmark.meters import STAGES
from stts_hf.benchmark.presets import PRESETS, find_preset, vary
from stts_hf.cli import bench
from stts_hf.cli.main import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a whole run of the tiny preset."""
    folder = tmp_path_factory.mktemp("results") / "tiny"
    words = ["bench", "--preset", "tiny", "--repeats", "2", "--device", "cpu", "--output", str(folder)]
    with pytest.MonkeyPatch.context() as typed:
        typed.setattr("sys.argv", ["stts-hf", *words])
        assert main(words) == 0
    return folder


def refused(capsys, *arguments: str) -> str:
    """What the command says no with."""
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_it_writes_samples_and_page(tiny):
    assert sorted(path.name for path in tiny.iterdir()) == ["README.md", "result.json"]
    assert (tiny / "README.md").read_text().startswith("# stts-hf bench: tiny")


def test_the_result_holds_every_raw_sample(tiny):
    found = json.loads((tiny / "result.json").read_text())
    assert found["schema"] == 2
    assert found["command"].endswith(f"stts-hf bench --preset tiny --repeats 2 --device cpu --output {tiny}")
    assert {"cpu", "cores", "threads", "memory", "device", "load_before", "load_after"} <= set(found["machine"])
    assert {"torch", "transformers", "stts_hf", "python", "commit"} <= set(found["versions"])
    assert found["seconds"] > 0
    seen = set()
    for cell in found["cells"]:
        assert cell["status"] == "ok"
        assert len(cell["order"]) == 2
        assert [variant["name"] for variant in cell["variants"]] == ["stock", "0", "0.5"]
        for variant in cell["variants"]:
            assert variant["peak_memory"] > 0
            for stage, measured in variant["stages"].items():
                seen.add(stage)
                assert len(measured["seconds"]) == 2
                assert all(seconds > 0 for seconds in measured["seconds"])
    assert seen == set(STAGES)


def test_stages_add_up_to_no_more_than_the_total(tiny):
    for cell in json.loads((tiny / "result.json").read_text())["cells"]:
        for variant in cell["variants"]:
            stages = {name: measured["seconds"] for name, measured in variant["stages"].items()}
            apart = ("vision_tower", "connector", "sequence", "language_model", "forward", "backward", "optimiser_step")
            for index, total in enumerate(stages["total"]):
                parts = sum(stages[name][index] for name in apart if name in stages)
                assert parts <= total * 1.001


def test_the_page_is_made_of_the_samples_alone(tiny, capsys):
    page = (tiny / "README.md").read_text()
    (tiny / "README.md").write_text("edited by hand")
    assert main(["bench", "--render", "--output", str(tiny)]) == 0
    assert (tiny / "README.md").read_text() == page


def test_the_list_names_every_preset_and_what_it_takes(capsys):
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert re.search(rf"^{name} +{re.escape(preset.help)}$", printed, re.M)
        assert preset.takes in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tower", "--modes", "training"], "'tower' measures tower, which --modes leaves out"),
        (["--backends", "flex_attention"], "'flex_attention' needs a GPU"),
        (["--pruning-layers", "1", "5"], "`pruning_layer` is 5"),
        (["--preset", "qwen"], "preset 'qwen' is for a GPU"),
        (["--preset", "paper"], "'paper' is for a GPU"),
        (["--device", "abacus"], "--device abacus cannot be used here"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--render"], "--render measures nothing, so --device would have no effect"),
        (["--list", "--preset", "tower"], "--list measures nothing, so --device, --preset would have no effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_name_the_option_and_what_would_be_right(capsys, arguments, message):
    assert message in refused(capsys, "--device", "cpu", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "--preset: invalid choice: 'huge' (choose from"),
        (["--layouts", "zigzag"], "--layouts: invalid choice: 'zigzag' (choose from"),
        (["--backends", "cuda"], "--backends: invalid choice: 'cuda'"),
        (["--dtypes", "int8"], "--dtypes: invalid choice: 'int8'"),
        (["--modes", "serving"], "--modes: invalid choice: 'serving'"),
        (["--ratios", "0.5", "50"], "--ratios: is 50, but must be a share from 0"),
        (["--ratios", "nan"], "--ratios: is nan"),
        (["--frames", "0"], "--frames: is 0, but must be at least 1"),
        (["--batches", "-1"], "--batches: is -1"),
        (["--batches", "many"], "--batches: invalid count value: 'many'"),
        (["--repeats", "0"], "--repeats: is 0, but must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_cannot_be_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "layout"),
    [
        (False, "cuda:0", "bfloat16", "varlen"),
        (True, "cpu", "bfloat16", "varlen"),
        (True, "cuda:0", "float32", "varlen"),
        (True, "cuda:0", "bfloat16", "first_fit_descending"),
    ],
)
def test_flash_attention_is_refused_where_it_cannot_run(monkeypatch, installed, device, dtype, layout):
    monkeypatch.setattr("stts_hf.benchmark.measure.FLASH_BACKENDS", {"flash_attention_2": lambda: installed})
    preset = vary(find_preset("tiny"), backend=["flash_attention_2"], dtype=[dtype], layout=[layout])
    with pytest.raises(ValueError, match="'flash_attention_2' needs its package, a CUDA device, --dtypes bfloat16"):
        check_runnable(preset, torch.device(device))


def test_an_output_that_cannot_be_is_refused_before_measuring(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "must be a folder that can be written" in refused(capsys, "--output", str(tmp_path / "file"))
    message = refused(capsys, "--output", str(tmp_path / "file" / "sub"))
    assert message.endswith(f"must be a folder that can be written, but {tmp_path / 'file'} is not\n")


def test_axes_replace_the_presets_values_in_every_combination():
    varied = vary(find_preset("tower"), frames=[1, 2], layout=["varlen", "first_fit_descending"], ratios=[(0.1, 0.5)])
    assert [(w.frames, w.layout) for w in varied.workloads] == [
        (1, "varlen"),
        (1, "first_fit_descending"),
        (2, "varlen"),
        (2, "first_fit_descending"),
    ]
    assert {w.ratios for w in varied.workloads} == {(0.1, 0.5)}


def test_on_a_gpu_the_tower_presets_are_full_size_in_half_precision():
    for name in ("tower", "scaling"):
        assert {(w.geometry, w.dtype) for w in find_preset(name, on_gpu=True).workloads} == {("so400m", "bfloat16")}


def test_the_command_names_what_the_environment_tunes(monkeypatch):
    for name in [name for name in os.environ if name.startswith(bench.TUNING)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.argv", ["bin/stts-hf", "bench", "--preset", "tiny"])
    assert bench.command_line() == "stts-hf bench --preset tiny"
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    monkeypatch.setenv("HOME", "elsewhere")
    assert bench.command_line() == "MALLOC_MMAP_MAX_=0 stts-hf bench --preset tiny"


def test_no_result_is_replaced_where_no_folder_was_named(tmp_path):
    assert bench.unused(tmp_path / "tower") == tmp_path / "tower"
    for name in ("tower", "tower-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}")
    (tmp_path / "tower-3").mkdir()
    assert bench.unused(tmp_path / "tower") == tmp_path / "tower-3"
