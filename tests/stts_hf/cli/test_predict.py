"""`stts-hf predict` on a tiny checkpoint: rows, files, what goes on, and what is refused."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch

from stts_hf.cli.main import main
from stts_hf.inference import generate
from stts_hf.inference.predicting import Predictor
from tests.checkpoints import ANSWER, BLOCKS
from tests.clips import write_clip
from tests.small_disk import small_disk
from tests.training_files import write_rows

COLUMNS = ["id", "video", "prompt", "answer", "video_tokens_kept", "video_tokens", "prompt_tokens", "new_tokens"]
COLUMNS += ["frames", "damaged_frames", "seconds", "error"]
PROMPT = ["--prompt", "What moves?"]
RAY = ["clips", *PROMPT, "--engine", "ray"]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of clips that are shown as 2 and 3 frames, and a file that is no video."""
    folder = tmp_path_factory.mktemp("made") / "clips"
    folder.mkdir()
    write_clip(folder / "two.mp4", 5, fps=20)
    write_clip(folder / "three.mp4", 10, fps=20)
    (folder / "words.mp4").write_bytes(b"no video\n" * 100)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """The current folder, with the clips in `clips`, and rows about them."""
    shutil.copytree(made, tmp_path / "clips")
    rows = [("a", "two", "What moves?"), ("b", "three", "Where?"), ("c", "two", "And how often does it turn?")]
    write_rows(
        tmp_path,
        [{"id": name, "video": f"clips/{clip}.mp4", "prompt": words} for name, clip, words in rows],
        "rows.jsonl",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, checkpoint, capsys):
    """Runs the command, in one process; returns exit status, stdout and stderr."""

    def run(*arguments: str, command: str = "predict"):
        workers = ["--workers", "0"] if command == "predict" else []
        status = main([command, *arguments, "--checkpoint", str(checkpoint), "--max-new-tokens", "40", *workers])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def lines(path: str = "out.jsonl") -> dict[str, dict[str, Any]]:
    """The rows of a file, by id; none may be there twice."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_a_row_for_each_input(run):
    status, out, _ = run("rows.jsonl", "--output", "out.jsonl", "--pruning-ratio", "0.3")
    assert status == 0
    found = lines()
    assert list(found) == ["a", "c", "b"]  # those about one video together
    assert list(found["a"]) == COLUMNS
    # floor(0.3 * 32) = 9 of 2 frames are dropped, floor(0.3 * 48) = 14 of 3.
    assert [found[name]["video_tokens_kept"] for name in "abc"] == [32 - 9, 48 - 14, 32 - 9]
    assert [found[name]["video_tokens"] for name in "abc"] == [2 * BLOCKS, 3 * BLOCKS, 2 * BLOCKS]
    assert [found[name]["frames"] for name in "abc"] == [2, 3, 2]
    assert {row["answer"] for row in found.values()} == {ANSWER}
    assert found["b"]["video"] == "clips/three.mp4"
    assert found["b"]["prompt"] == "Where?"
    assert re.search(r"^rows: +3: 3 answered, 0 with an error$", out, re.M)
    assert re.search(r"^video tokens: +80 of 112 kept", out, re.M)
    assert json.loads(Path("out.summary.json").read_text())["answered"] == 3


def test_a_bad_video_is_a_row_with_its_error(run):
    status, out, err = run("clips", *PROMPT, "--output", "out.jsonl")
    assert status == 1
    assert re.search(r"^rows: +3: 2 answered, 1 with an error$", out, re.M)
    bad = lines()["clips/words.mp4"]
    assert {name for name, value in bad.items() if value is not None} == {"id", "video", "prompt", "seconds", "error"}
    assert bad["error"].startswith("Cannot read video file 'clips/words.mp4'")
    assert err.splitlines()[-1] == "stts-hf predict: error: 1 rows could not be answered"


def test_errors_stay_until_they_are_to_be_tried_again(run, here, monkeypatch):
    run("clips", *PROMPT, "--output", "out.jsonl")
    shutil.copy("clips/two.mp4", "clips/words.mp4")
    before = Path("out.jsonl").read_bytes()
    assert run("clips", *PROMPT, "--output", "out.jsonl")[0] == 1
    assert Path("out.jsonl").read_bytes() == before
    status, out, err = run("clips", *PROMPT, "--output", "out.jsonl", "--retry-errors")
    assert status == 0
    assert "2 of 3 rows are in out.jsonl already" in err
    assert re.search(r"^this run: +1 rows in ", out, re.M)
    assert lines().keys() == {"clips/two.mp4", "clips/three.mp4", "clips/words.mp4"}


def test_an_error_of_a_video_that_is_gone_is_none_of_this_run(run):
    assert run("clips", *PROMPT, "--output", "out.jsonl")[0] == 1
    Path("clips/words.mp4").unlink()
    status, _, err = run("clips", *PROMPT, "--output", "out.jsonl")
    assert status == 0
    assert "words.mp4" not in err


def test_it_goes_on_where_it_was_killed(run):
    run("rows.jsonl", "--output", "out.jsonl")
    whole = lines()
    first, second, _ = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(first + second[:30])
    assert run("rows.jsonl", "--output", "out.jsonl", "--batch-size", "1")[0] == 0
    assert {name: row | {"seconds": 0} for name, row in lines().items()} == {
        name: row | {"seconds": 0} for name, row in whole.items()
    }


def test_new_videos_of_a_folder_are_done_and_old_answers_stay(run):
    run("clips", *PROMPT, "--output", "out.jsonl")
    shutil.copy("clips/two.mp4", "clips/four.mp4")
    Path("clips/two.mp4").unlink()
    assert run("clips", *PROMPT, "--output", "out.jsonl")[0] == 1
    assert sorted(lines()) == [f"clips/{name}.mp4" for name in ("four", "three", "two", "words")]


def test_parquet_is_whole_and_in_the_order_of_the_inputs(run):
    assert run("rows.jsonl", "--output", "out.parquet")[0] == 0
    table = pyarrow.parquet.read_table("out.parquet")
    assert table.column_names == COLUMNS
    assert table.to_pylist() == [lines()[name] for name in "abc"]
    before = Path("out.parquet").read_bytes()
    assert run("rows.jsonl", "--output", "out.parquet")[0] == 0
    assert Path("out.parquet").read_bytes() == before


def test_a_parquet_file_of_errors_alone_has_the_same_columns(run):
    assert run("clips/words.mp4", *PROMPT, "--output", "out.parquet")[0] == 1
    assert run("clips/two.mp4", *PROMPT, "--output", "two.parquet")[0] == 0
    tables = [pyarrow.parquet.read_table(name) for name in ("out.parquet", "two.parquet")]
    assert tables[0].schema == tables[1].schema


def test_videos_that_lie_in_a_data_set(run, here):
    videos = [{"bytes": Path("clips/two.mp4").read_bytes(), "path": None}, {"bytes": b"no video", "path": None}]
    features = {
        "id": datasets.Value("string"),
        "video": datasets.Video(decode=False),
        "prompt": datasets.Value("string"),
    }
    columns = {"id": ["a", "b"], "video": videos, "prompt": ["What moves?", "Where?"]}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet("rows.parquet")
    assert run("rows.parquet", "--output", "out.jsonl")[0] == 1
    assert (lines()["a"]["answer"], lines()["a"]["frames"], lines()["a"]["video"]) == (ANSWER, 2, None)
    assert lines()["b"]["error"].startswith("Cannot read the video's bytes as a video")


def test_without_output_it_prints(run, here):
    before = sorted(here.iterdir())
    status, out, _ = run("rows.jsonl")
    assert status == 0
    assert re.findall(r"^\[(\d)/3\] (.*)$", out, re.M) == [("1", "a"), ("2", "c"), ("3", "b")]
    assert re.findall(r"^answer: +(.*)$", out, re.M) == [ANSWER] * 3
    assert sorted(here.iterdir()) == before


def test_run_of_several_videos_is_the_same(run, monkeypatch):
    monkeypatch.setattr("stts_hf.cli.predict_engines.workers_of", lambda arguments: 0)
    status, out, _ = run("clips/two.mp4", "clips/three.mp4", "What moves?", command="run")
    assert status == 0
    assert re.findall(r"^\[(\d)/2\] (.*)$", out, re.M) == [("1", "clips/two.mp4"), ("2", "clips/three.mp4")]
    assert re.findall(r"^answer: +(.*)$", out, re.M) == [ANSWER] * 2


def test_a_video_that_is_deleted_meanwhile_is_an_error_alone(run, monkeypatch):
    real = Predictor.predict

    def predict(self, rows):
        Path("clips/two.mp4").unlink()
        return real(self, rows)

    monkeypatch.setattr(Predictor, "predict", predict)
    assert run("rows.jsonl", "--output", "out.jsonl")[0] == 1
    assert [lines()[name]["error"] is None for name in "abc"] == [False, True, False]


def test_a_full_disk_keeps_what_is_done_and_the_next_run_goes_on(run):
    with small_disk(700):
        status, _, err = run("rows.jsonl", "--output", "out.jsonl", "--batch-size", "1")
    assert status == 2
    assert re.search(r"error: --output out\.jsonl cannot be written: .*What it holds stays; the same command goes", err)
    there = lines()
    assert 0 < len(there) < 3
    assert run("rows.jsonl", "--output", "out.jsonl")[0] == 0
    assert {name: lines()[name] for name in there} == there
    assert lines().keys() == {"a", "b", "c"}


def test_interrupting_keeps_what_was_written(run, monkeypatch):
    real = generate.inputs_for
    calls: list[int] = []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr("stts_hf.inference.generate.inputs_for", interrupt)
    status, out, err = run("clips/two.mp4", "clips/three.mp4", *PROMPT, "--output", "out.jsonl", "--batch-size", "1")
    assert status == 130
    assert list(lines()) == ["clips/two.mp4"]
    assert err.splitlines()[-2:] == [
        "1 answers are in out.jsonl; the same command goes on from there",
        "stts-hf predict: interrupted",
    ]
    assert "Traceback" not in out + err


def test_a_video_too_large_for_the_device_is_an_error_alone(run, monkeypatch):
    real = generate.inputs_for

    def too_large(model, inputs):
        if inputs["video_grids"][:, 0].max() == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, inputs)

    monkeypatch.setattr("stts_hf.inference.generate.inputs_for", too_large)
    assert run("clips/two.mp4", "clips/three.mp4", *PROMPT, "--output", "out.jsonl")[0] == 1
    assert lines()["clips/two.mp4"]["answer"] == ANSWER
    error = lines()["clips/three.mp4"]["error"]
    assert error.startswith(
        "This row alone does not fit into memory (CUDA out of memory.): fewer frames, a higher pruning"
    )


def test_names_that_are_no_text(run):
    video = b"clips/\xff.mp4".decode("utf-8", "surrogateescape")
    try:
        shutil.copy("clips/two.mp4", video)
    except OSError:
        pytest.skip("this file system takes no such names")
    assert run(video, *PROMPT, "--output", "out.parquet")[0] == 0
    assert lines()[video]["video"] == video
    assert pyarrow.parquet.read_table("out.parquet")["id"].to_pylist() == ["clips/\\udcff.mp4"]
    assert "\\udcff.mp4" in run(video, *PROMPT)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["clips", "--prompt", "Why?"], 'prompt was "What moves?", and is "Why?" now'),
        (["clips", *PROMPT, "--pruning-ratio", "0.3"], "pruning_ratio was 0.5, and is 0.3 now"),
        (["clips/two.mp4", *PROMPT], 'inputs was ["clips"], and is ["clips/two.mp4"] now'),
        (["clips", *PROMPT, "--selector", "cosine"], 'selector was "scorer", and is "cosine" now'),
    ],
    ids=["prompt", "ratio", "inputs", "selector"],
)
def test_a_file_of_another_job_is_refused_and_stays(run, options, message):
    run("clips", *PROMPT, "--output", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    status, _, err = run(*options, "--output", "out.jsonl")
    assert status == 2
    assert message in err
    assert Path("out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("Where?", "Why?", "row b asks 'Why?' now, and its answer there asks 'Where?'"),
        ("clips/two.mp4", "clips/three.mp4", "row a is about 'clips/three.mp4' now"),
    ],
    ids=["prompt", "video"],
)
def test_rows_that_ask_something_else_now_are_another_job(run, here, before, now, said):
    run("rows.jsonl", "--output", "out.jsonl")
    answers = Path("out.jsonl").read_bytes()
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows.replace(before, now, 1))
    assert Path("rows.jsonl").read_text() != rows
    status, _, err = run("rows.jsonl", "--output", "out.jsonl")
    assert status == 2
    assert f"holds answers of another job: {said}" in err
    assert Path("out.jsonl").read_bytes() == answers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clips"], "prompt is missing for 3 of 3 rows"),
        (["clips", "--prompt", "What is <|video|>?"], "--prompt: question holds '<|video|>'"),
        (["gone", *PROMPT], "gone does not exist. Name"),
        (["clips", *PROMPT, "--retry-errors"], "--retry-errors needs --output"),
        (["clips", *PROMPT, "--output", "out.csv"], "--output out.csv must be a file that ends in .jsonl or .parquet"),
        (["clips", *PROMPT, "--output", "no/out.jsonl"], "--output no/out.jsonl lies in a folder that does not exist"),
        (["rows.jsonl", "--output", "rows.jsonl"], "--output rows.jsonl is the file of the questions"),
        (["rows.jsonl", "--output", "rows.parquet"], "--output rows.jsonl is the file of the questions"),
        (["clips", *PROMPT, "--test-time-scaling", "--pruning-ratio", "1"], "--test-time-scaling needs"),
        (["clips", *PROMPT, "--device", "abacus"], "--device abacus cannot be used here"),
        (["clips", *PROMPT, "--gpus", "0"], "--gpus needs --engine ray"),
        pytest.param([*RAY, "--address", "127.0.0.1:1"], "--address 127.0.0.1:1 cannot be used: ", marks=needs_ray),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_before_weights_are_loaded(run, here, monkeypatch, arguments, words):
    monkeypatch.setattr("stts_hf.inference.predicting.load_model", None)
    before = sorted(here.iterdir())
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    assert sorted(here.iterdir()) == before


def test_answers_that_lie_among_the_videos_are_no_input(run):
    for inputs in ["clips"], ["clips/*"]:
        command = [*inputs, *PROMPT, "--output", f"clips/{len(inputs[0])}.parquet"]
        assert run(*command)[0] == 1
        before = sorted(Path("clips").glob("*.mp4"))
        status, _, err = run(*command)
        assert status == 1
        assert f"{len(before)} of {len(before)} rows are in " in err
        for path in Path("clips").glob(f"{len(inputs[0])}.*"):
            path.unlink()


@pytest.mark.parametrize("output", ["pipe.jsonl", "x" * 256 + ".jsonl", "loop.jsonl", "loop.jsonl/out.jsonl"])
def test_an_output_that_is_no_file_is_refused(run, here, output):
    os.mkfifo("pipe.jsonl")
    Path("loop.jsonl").symlink_to("loop.jsonl")
    status, _, err = run("clips", *PROMPT, "--output", output)
    assert status == 2
    assert f"--output {output} " in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_url_is_refused_with_the_name_of_the_option(run):
    run("https://example.com/a.mp4", *PROMPT, "--output", "out.jsonl")
    assert "--allow-urls" in lines()["https://example.com/a.mp4"]["error"]


def test_a_checkpoint_that_needs_its_own_code_is_refused_without_advice_to_run_it(run, here, checkpoint, capsys):
    shutil.copytree(checkpoint, "own")
    settings = json.loads(Path("own/tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    Path("own/tokenizer_config.json").write_text(json.dumps(settings))
    Path("own/own.py").write_text("raise SystemExit('it ran')")
    for command in ["predict", "clips", *PROMPT], ["run", "clips/two.mp4", "What?"]:
        assert main([*command, "--checkpoint", "own"]) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert "--checkpoint own" in err
        assert "trust_remote_code" not in err


@pytest.mark.parametrize(
    ("arguments", "extra"), [(["clips", *PROMPT, "--output", "out.parquet"], "train"), (RAY, "ray")], ids=str
)
def test_packages_that_are_missing_are_named_before_anything_is_answered(run, monkeypatch, arguments, extra):
    def lacks(extra: str) -> None:
        raise ImportError(f"a package of {extra} is required.")

    monkeypatch.setattr("stts_hf.inference.predicting.load_model", None)
    monkeypatch.setattr("stts_hf.cli.errors.check_versions", lacks)
    status, _, err = run(*arguments)
    assert status == 2
    assert f"pip install 'stts-hf[{extra}]'" in err
