"""`stts-hf predict` on a tiny checkpoint: rows, files, resuming, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from stts_hf.cli.main import main
from stts_hf.inference import generate
from tests.checkpoints import ANSWER, BLOCKS
from tests.clips import write_clip
from tests.training_files import write_rows

COLUMNS = ["id", "video", "prompt", "answer", "video_tokens_kept", "video_tokens", "prompt_tokens", "new_tokens"]
COLUMNS += ["frames", "damaged_frames", "seconds", "error"]
PROMPT = ["--prompt", "What moves?"]
ANSWERING = ["--max-new-tokens", "40"]
RAY = ["clips", *PROMPT, "--engine", "ray"]


def words_of(*arguments: object, checkpoint: Path) -> list[str]:
    """The command's words; it decodes in a thread."""
    return ["predict", *map(str, arguments), "--checkpoint", str(checkpoint), *ANSWERING, "--workers", "0"]


def command(*arguments: object, checkpoint: Path) -> int:
    """The exit status of the command."""
    return main(words_of(*arguments, checkpoint=checkpoint))


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint) -> Path:
    """
    Clips that are shown as 2 and 3 frames, a file that is no video, rows about the clips, and what the command wrote
    about both.
    """
    folder = tmp_path_factory.mktemp("made")
    (folder / "clips").mkdir()
    write_clip(folder / "clips/two.mp4", 5, fps=20)
    write_clip(folder / "clips/three.mp4", 10, fps=20)
    (folder / "clips/words.mp4").write_bytes(b"no video\n" * 100)
    rows = [("a", "two", "What moves?"), ("b", "three", "Where?"), ("c", "two", "And how often does it turn?")]
    write_rows(
        folder,
        [{"id": name, "video": f"clips/{clip}.mp4", "prompt": words} for name, clip, words in rows],
        "rows.jsonl",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert command("rows.jsonl", "--output", "rows-done.jsonl", checkpoint=checkpoint) == 0
        assert command("clips", *PROMPT, "--output", "clips-done.jsonl", checkpoint=checkpoint) == 1
    return folder


@pytest.fixture
def run(here, checkpoint, captured):
    """Runs the command; returns exit status, stdout and stderr."""

    def run(*arguments: str):
        return captured(words_of(*arguments, checkpoint=checkpoint))

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
    assert (found["b"]["video"], found["b"]["prompt"]) == ("clips/three.mp4", "Where?")
    assert re.search(r"^rows: +3: 3 answered, 0 with an error$", out, re.M)
    assert re.search(r"^video tokens: +80 of 112 kept", out, re.M)
    assert json.loads(Path("out.summary.json").read_text())["answered"] == 3


def test_a_threshold_a_budget_and_rows_with_their_own(run):
    rows = list(lines("rows.jsonl").values())
    rows[0]["pruning_ratio"], rows[1]["video_token_budget"], rows[2]["score_threshold"] = 0.25, 20, 0.0
    write_rows(Path(), rows, "own.jsonl")
    command = ["own.jsonl", "--output", "out.jsonl", "--score-threshold", "1.0", "--max-pruning-ratio", "50%"]
    status, _, err = run(*command)
    assert status == 0
    assert "Answering, scores from 1 kept, 0% to 50% dropped: 3 rows on cpu" in err
    found = lines()
    # Of 2 frames of 16, of 3, and of 2: a quarter drops; a budget, below half of it; everything reaches 0.
    assert [found[name]["video_tokens_kept"] for name in "abc"] == [24, 20, 32]
    rows[0]["pruning_ratio"] = 0.5
    write_rows(Path(), rows, "own.jsonl")
    status, _, err = run(*command)
    assert status == 2
    assert "holds answers of other settings: rules was" in err
    rows[0]["score_threshold"] = 0.5
    write_rows(Path(), rows, "both.jsonl")
    assert run("both.jsonl", "--output", "both-done.jsonl")[0] == 1
    assert "leave out one" in lines("both-done.jsonl")["a"]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pruning-ratio", "0.5", "--score-threshold", "0.1"], "leave out one"),
        (["--score-threshold", "7"], "lie in"),
        (["--score-threshold", "0.1", "--selector", "random"], "not comparable between videos"),
        (["--min-pruning-ratio", "0.5"], "pass a `score_threshold` too"),
        (["--score-threshold", "0.1", "--min-pruning-ratio", "0.5", "--max-pruning-ratio", "0.2"], "must be at most"),
        (["--score-threshold", "0.1", "--test-time-scaling"], "needs a pruning_ratio below 1, or a score_threshold"),
        (["--video-token-budget", "0"], "must be at least 1"),
    ],
    ids=["both", "range", "random", "a bound", "bounds", "scaling", "budget"],
)
def test_what_does_not_fit_is_one_line(run, capsys, options, message):
    try:
        status, _, err = run("clips", *PROMPT, *options)
    except SystemExit as end:
        status, err = end.code, capsys.readouterr().err
    assert status == 2
    assert message in err.splitlines()[-1]


def test_a_bad_video_is_a_row_with_its_error_which_stays_until_it_is_to_be_tried_again(run):
    bad = lines("clips-done.jsonl")["clips/words.mp4"]
    assert {name for name, value in bad.items() if value is not None} == {"id", "video", "prompt", "seconds", "error"}
    assert bad["error"].startswith("Cannot read video file 'clips/words.mp4'")
    shutil.copy("clips/two.mp4", "clips/words.mp4")
    before = Path("clips-done.jsonl").read_bytes()
    status, out, err = run("clips", *PROMPT, "--output", "clips-done.jsonl")
    assert status == 1
    assert re.search(r"^rows: +3: 2 answered, 1 with an error$", out, re.M)
    assert err.splitlines()[-1] == "stts-hf predict: error: 1 rows could not be answered"
    assert Path("clips-done.jsonl").read_bytes() == before
    status, out, err = run("clips", *PROMPT, "--output", "clips-done.jsonl", "--retry-errors")
    assert status == 0
    assert "2 of 3 rows are answered in clips-done.jsonl already" in err
    assert re.search(r"^this run: +1 rows in ", out, re.M)
    assert lines("clips-done.jsonl").keys() == {"clips/two.mp4", "clips/three.mp4", "clips/words.mp4"}


def test_new_videos_of_a_folder_are_done_and_old_answers_stay(run):
    shutil.copy("clips/two.mp4", "clips/four.mp4")
    Path("clips/two.mp4").unlink()
    Path("clips/words.mp4").unlink()
    status, _, err = run("clips", *PROMPT, "--output", "clips-done.jsonl")
    assert status == 0  # the error of a video that is gone is none of this run
    assert "words.mp4" not in err
    assert sorted(lines("clips-done.jsonl")) == [f"clips/{name}.mp4" for name in ("four", "three", "two", "words")]


def test_parquet_is_whole_and_in_the_order_of_the_inputs(run):
    for name in ("jsonl", "summary.json"):
        Path(f"rows-done.{name}").rename(f"out.{name}")
    assert run("rows.jsonl", "--output", "out.parquet")[0] == 0
    table = pyarrow.parquet.read_table("out.parquet")
    assert table.column_names == COLUMNS
    assert table.to_pylist() == [lines()[name] for name in "abc"]
    Path("odd.jsonl").write_text('{"id": "d", "video": "clips/two.mp4", "prompt": 3}')
    assert run("odd.jsonl", "--output", "errors.parquet")[0] == 1
    assert pyarrow.parquet.read_table("errors.parquet").schema == table.schema


def test_videos_that_lie_in_a_data_set(run):
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


@pytest.mark.slow
def test_whoever_reads_the_answers_may_stop(here, checkpoint):
    words = words_of("rows.jsonl", checkpoint=checkpoint)
    with subprocess.Popen([sys.executable, "-m", "stts_hf.cli.main", *words], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said.splitlines()[-1].startswith(b"stts-hf predict: error: what reads")) == (2, True)
    assert b"Traceback" not in said


def test_run_of_several_videos_is_predict_without_output(here, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("stts_hf.cli.predict.workers_of", lambda arguments: 0)
    before = sorted(here.iterdir())
    clips = ["clips/two.mp4", "clips/three.mp4"]
    assert main(["run", *clips, "What moves?", "--checkpoint", str(checkpoint), *ANSWERING]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\[(\d)/2\] (.*)$", out, re.M) == [("1", clips[0]), ("2", clips[1])]
    assert re.findall(r"^answer: +(.*)$", out, re.M) == [ANSWER] * 2
    assert sorted(here.iterdir()) == before


def test_interrupting_keeps_what_was_written(run, monkeypatch):
    real = generate.inputs_for
    calls: list[int] = []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(generate, "inputs_for", interrupt)
    status, _, err = run("clips/two.mp4", "clips/three.mp4", *PROMPT, "--output", "out.jsonl", "--batch-size", "1")
    assert status == 130
    assert list(lines()) == ["clips/two.mp4"]
    assert err.splitlines()[-2:] == [
        "1 answers are in out.jsonl; the same command goes on from there",
        "stts-hf predict: interrupted",
    ]


def test_names_that_are_no_text(run):
    video = b"clips/\xff.mp4".decode("utf-8", "surrogateescape")
    try:
        shutil.copy("clips/two.mp4", video)
    except OSError:
        pytest.skip("this file system takes no such names")
    assert run(video, *PROMPT, "--output", "out.parquet")[0] == 0
    assert lines()[video]["video"] == video
    assert pyarrow.parquet.read_table("out.parquet")["id"].to_pylist() == ["clips/\\udcff.mp4"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("Where?", "Why?", "the prompt of row b is 'Why?', and was 'Where?'"),
        ("clips/two.mp4", "clips/three.mp4", "the video of row a is 'clips/three.mp4'"),
    ],
    ids=["prompt", "video"],
)
def test_answers_to_something_else_are_refused(run, before, now, said):
    rows, answers = Path("rows.jsonl"), Path("rows-done.jsonl").read_bytes()
    rows.write_text(rows.read_text().replace(before, now, 1))
    status, _, err = run("rows.jsonl", "--output", "rows-done.jsonl")
    assert (status, said in err) == (2, True)
    assert Path("rows-done.jsonl").read_bytes() == answers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clips"], "prompt is missing for 3 of 3 rows"),
        (["clips", "--prompt", "What is <|video|>?"], "--prompt: question holds '<|video|>'"),
        (["clips", *PROMPT, "--retry-errors"], "--retry-errors needs --output"),
        (["clips", *PROMPT, "--output", "out.csv"], "--output out.csv must be a file that ends in .jsonl or .parquet"),
        (["clips", *PROMPT, "--output", "no/out.jsonl"], "--output no/out.jsonl lies in a folder that does not exist"),
        (["rows.jsonl", "--output", "rows.parquet"], "--output would write to rows.jsonl, which is an input"),
        (["clips", *PROMPT, "--test-time-scaling", "--pruning-ratio", "1"], "needs a pruning_ratio below 1"),
        (["clips", *PROMPT, "--gpus", "0"], "--gpus needs --engine ray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_before_weights_are_loaded(run, here, monkeypatch, arguments, words):
    monkeypatch.setattr("stts_hf.inference.predictor.load_model", None)
    before = sorted(here.iterdir())
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert sorted(here.iterdir()) == before


def test_answers_that_lie_among_the_videos_are_no_input(run):
    for _ in range(2):
        status, _, err = run("clips/*", *PROMPT, "--output", "clips/answers.parquet")
        assert status == 1  # of the file that is no video
    assert "3 of 3 rows are answered in " in err


@pytest.mark.parametrize("output", ["pipe.jsonl", "x" * 256 + ".jsonl", "loop.jsonl"])
def test_an_output_that_is_no_file_is_refused(run, output):
    os.mkfifo("pipe.jsonl")
    Path("loop.jsonl").symlink_to("loop.jsonl")
    status, _, err = run("clips", *PROMPT, "--output", output)
    assert status == 2
    assert f"--output {output} " in err.splitlines()[-1]


def test_a_url_of_a_row_is_refused_with_the_name_of_the_option(run):
    Path("rows.jsonl").write_text(json.dumps({"id": "a", "video": "https://example.com/a.mp4", "prompt": "What?"}))
    run("rows.jsonl", "--output", "out.jsonl")
    assert "--allow-urls" in lines()["a"]["error"]


@pytest.mark.parametrize(
    ("arguments", "extra"), [(["clips", *PROMPT, "--output", "out.parquet"], "train"), (RAY, "ray")], ids=str
)
def test_packages_that_are_missing_are_named_before_anything_is_answered(run, monkeypatch, arguments, extra):
    def lacks(extra: str) -> None:
        raise ImportError(f"a package of {extra} is required.")

    monkeypatch.setattr("stts_hf.inference.predictor.load_model", None)
    monkeypatch.setattr("stts_hf.cli.errors.check_versions", lacks)
    status, _, err = run(*arguments)
    assert status == 2
    assert f"pip install 'stts-hf[{extra}]'" in err
