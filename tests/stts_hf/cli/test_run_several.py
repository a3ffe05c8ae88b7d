"""`stts-hf run` with several videos, and its answers file: what comes when, what is kept, and what is refused."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from PIL import Image

from stts_hf.cli.errors import CommandError
from stts_hf.cli.main import main
from stts_hf.cli.report import answers_file, sheet_paths
from stts_hf.inference import answering
from stts_hf.inference.answering import VideoAnswer
from tests.clips import write_clip
from tests.small_disk import small_disk

PATIENCE = 20  # seconds until a test that would hang fails
QUESTION = "What moves?"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of three clips of 0.4, 0.8 and 1.2 seconds, and a file that is no video."""
    folder = tmp_path_factory.mktemp("made")
    for place, name in enumerate("abc"):
        write_clip(folder / f"{name}.mp4", 10 * (place + 1))
    (folder / "words.mp4").write_bytes(b"no video\n" * 100)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """The current folder: a copy of the clips."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, hub_configs, capsys):
    """Runs the command on videos, with 2 frames and 2 new tokens each; returns exit status, stdout and stderr."""

    def run(*arguments: str):
        few = ["--num-frames", "2", "--max-new-tokens", "2", "--checkpoint", str(hub_configs / "stts-tiny")]
        status = main(["run", *arguments, *few])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def before_answer(monkeypatch):
    """Has something called with the path of each video before the model answers about it."""

    def install(call):
        real = answering.answer_prepared

        def answer_prepared(model, processor, prepared, **options):
            for begun, _ in prepared:
                call(begun.video)
            return real(model, processor, prepared, **options)

        monkeypatch.setattr(answering, "answer_prepared", answer_prepared)

    return install


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_videos_are_answered_in_order_and_summed_up(run, here):
    status, out, _ = run("b.mp4", "a.mp4", "c.mp4", QUESTION)
    assert status == 0
    assert re.findall(r"^\[(\d)/3\] (.*)$", out, re.M) == [("1", "b.mp4"), ("2", "a.mp4"), ("3", "c.mp4")]
    assert re.findall(r"^frames: +2 sampled .* of a video of (0\.\d|1\.\d) s$", out, re.M) == ["0.8", "0.4", "1.2"]
    assert len(re.findall(r"^answer: +\S", out, re.M)) == 3
    # floor(0.5 * 32) = 16 of 32 are dropped.
    assert len(re.findall(r"^video tokens: +16 of 32 kept", out, re.M)) == 3
    assert len(re.findall(r"^question: ", out, re.M)) == 1
    assert re.search(r"^videos: +3 answered$", out, re.M)
    assert re.search(r"^frames: +6 in \d+\.\d s \(\d+\.\d per second\)$", out, re.M)
    assert re.search(r"^waiting: +the model waited \d+\.\d s for decoding, \d+\.\d s of that for the first", out, re.M)
    assert "stock model" not in out
    assert not [*here.rglob("*.png")]


def test_next_video_is_decoded_while_the_model_answers(run, before_answer, monkeypatch):
    begun = {name: threading.Event() for name in ("a.mp4", "b.mp4", "c.mp4")}
    after = {"a.mp4": "b.mp4", "b.mp4": "c.mp4"}
    real = answering.prepare_video

    def prepare_video(processor, video, question, **options):
        begun[video].set()
        return real(processor, video, question, **options)

    monkeypatch.setattr(answering, "prepare_video", prepare_video)

    def wait_for_next(video):
        assert video not in after or begun[after[video]].wait(PATIENCE), f"{after[video]} was not begun"

    before_answer(wait_for_next)
    assert run(*begun, QUESTION)[0] == 0


def test_answers_file_holds_what_was_printed(run, here):
    _, out, _ = run("a.mp4", "b.mp4", QUESTION, "--pruning-ratio", "0.3", "--answers", "answers.jsonl")
    found = rows(here / "answers.jsonl")
    printed = re.findall(r"^answer: +(.*)$", out, re.M)
    prompts = re.findall(r"^prompt: +(\d+) of (\d+) ", out, re.M)
    for row, video, end, answer, prompt in zip(found, ("a", "b"), (0.36, 0.76), printed, prompts, strict=True):
        assert row == {
            "video": f"{video}.mp4",
            "question": QUESTION,
            "answer": row["answer"],
            "frames": 2,
            "damaged_frames": 0,
            "timestamps": [0.0, end],
            "video_tokens_kept": 23,  # floor(0.3 * 32) = 9 are dropped
            "video_tokens": 32,
            "prompt_tokens_kept": int(prompt[0]),
            "prompt_tokens": int(prompt[1]),
            "error": None,
        }
        assert answer == (row["answer"] or "(empty)")


def test_answers_file_has_each_line_as_soon_as_its_answer_is_there(run, here, before_answer):
    lines = []

    def count(video):
        lines.append(len((here / "answers.jsonl").read_text().splitlines()))

    before_answer(count)
    run("a.mp4", "b.mp4", "c.mp4", QUESTION, "--answers", "answers.jsonl")
    assert lines == [0, 1, 2]


def test_an_unreadable_video_stops_no_other(run, here):
    status, out, err = run("a.mp4", "words.mp4", "c.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 1
    assert err.splitlines()[-1] == "stts-hf run: error: 1 of 3 videos could not be read"
    assert re.search(r"^\[2/3\] words\.mp4\nerror: +.*Cannot read video file 'words\.mp4' as a video", out, re.M)
    assert re.search(r"^videos: +2 answered, 1 could not be read$", out, re.M)
    first, second, third = rows(here / "answers.jsonl")
    assert (first["error"], third["error"]) == (None, None)
    assert third["video"] == "c.mp4"
    assert "Cannot read video file 'words.mp4'" in second["error"]
    assert second.keys() == first.keys()
    assert {name for name, value in second.items() if value is not None} == {"video", "question", "error"}


def test_damaged_frames_are_counted(run, here):
    write_clip(here / "damaged.mkv", 150)
    data = bytearray((here / "damaged.mkv").read_bytes())
    middle = len(data) // 2
    data[middle:] = bytes(len(data) - middle)
    (here / "damaged.mkv").write_bytes(data)
    more = ["--num-frames", "12", "--answers", "answers.jsonl"]
    with pytest.warns(UserWarning, match="are damaged"):
        _, out, _ = run("a.mp4", "damaged.mkv", QUESTION, *more)
    whole, damaged = rows(here / "answers.jsonl")
    assert (whole["damaged_frames"], damaged["error"]) == (0, None)
    assert damaged["damaged_frames"] > 0
    assert re.findall(r"^damaged: +(\d+) frames", out, re.M) == [str(damaged["damaged_frames"])]


def test_interrupting_keeps_what_was_written(run, here, before_answer):
    def interrupt(video):
        if video == "b.mp4":
            raise KeyboardInterrupt

    before_answer(interrupt)
    status, out, err = run("a.mp4", "b.mp4", "c.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 130
    assert [row["video"] for row in rows(here / "answers.jsonl")] == ["a.mp4"]
    assert err.splitlines()[-2:] == ["1 of 3 videos were done", "stts-hf run: interrupted"]
    assert "Traceback" not in out + err
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_interrupting_before_the_first_answer_leaves_no_file(run, here, before_answer):
    def interrupt(video):
        assert (here / "answers.jsonl").exists()
        raise KeyboardInterrupt

    before_answer(interrupt)
    assert run("a.mp4", "b.mp4", QUESTION, "--answers", "answers.jsonl")[0] == 130
    assert not (here / "answers.jsonl").exists()


def test_a_full_disk_is_one_clear_line_and_keeps_whole_lines(tmp_path):
    path = tmp_path / "answers.jsonl"
    with small_disk(300), answers_file(path) as write:
        write(VideoAnswer("a.mp4", QUESTION))
        with pytest.raises(CommandError, match=rf"--answers {path} cannot be written: "):
            write(VideoAnswer("b.mp4", QUESTION))
    assert [row["video"] for row in rows(path)] == ["a.mp4"]


def test_a_disk_full_from_the_start_does_not_block_the_next_run(run, here):
    with small_disk(10):
        status, _, err = run("a.mp4", "b.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 2
    assert err.splitlines()[-1].startswith("stts-hf run: error: --answers answers.jsonl cannot be written: ")
    assert "Traceback" not in err
    assert not (here / "answers.jsonl").exists()
    assert run("a.mp4", "b.mp4", QUESTION, "--answers", "answers.jsonl")[0] == 0


def test_an_empty_answers_file_of_a_killed_run_is_taken_up(run, here):
    (here / "answers.jsonl").touch()
    assert run("a.mp4", "b.mp4", QUESTION, "--answers", "answers.jsonl")[0] == 0
    assert [row["video"] for row in rows(here / "answers.jsonl")] == ["a.mp4", "b.mp4"]


def test_a_video_that_is_gone_before_its_picture_stops_no_other(run, here, before_answer):
    before_answer(lambda video: Path(video).unlink() if Path(video).name == "a.mp4" else None)
    status, _, err = run("a.mp4", "b.mp4", QUESTION, "--output", "pictures")
    assert status == 1
    assert "a.contact_sheet.png is not drawn, as its video is read once more: There is no video file" in err
    assert [path.name for path in (here / "pictures").iterdir()] == ["b.contact_sheet.png"]


def test_output_is_a_folder_of_one_picture_each(run, here):
    (here / "more").mkdir()
    shutil.copy(here / "b.mp4", here / "more" / "a.mp4")
    status, out, _ = run("a.mp4", "more/a.mp4", "words.mp4", QUESTION, "--output", "new/pictures")
    assert status == 1
    pictures = sorted(path.name for path in (here / "new" / "pictures").iterdir())
    assert pictures == ["a-2.contact_sheet.png", "a.contact_sheet.png"]
    assert re.findall(r"^picture: +(.*)$", out, re.M) == [
        f"new/pictures/a{end}.contact_sheet.png" for end in ("", "-2")
    ]
    with Image.open(here / "new" / "pictures" / "a.contact_sheet.png") as image:
        assert image.width > 600


@pytest.mark.parametrize(
    ("videos", "names"),
    [
        (["x/a.mp4", "y/b.mkv"], ["a", "b"]),
        (["x/a.mp4", "y/a.mp4", "a.mkv"], ["a", "a-2", "a-3"]),
        (["a.mp4", "a.mp4", "a-2.mp4"], ["a", "a-2", "a-2-2"]),
        (["a-2.mp4", "a.mp4", "a.mkv"], ["a-2", "a", "a-3"]),
        (["A.mp4", "a.mp4"], ["A", "a-2"]),
        (["a.b.mp4", "a.c.mp4"], ["a.b", "a.c"]),
    ],
    ids=str,
)
def test_pictures_have_names_of_their_own(videos, names):
    assert sheet_paths(Path("out"), videos) == [Path("out") / f"{name}.contact_sheet.png" for name in names]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.mp4", "no.mp4", "gone.mp4", QUESTION], "VIDEO no.mp4 does not exist, gone.mp4 does not exist; pass"),
        (["a.mp4", "folder", QUESTION], "VIDEO folder is a folder; pass"),
        (["a.mp4", "pipe", QUESTION], "VIDEO pipe is no regular file, and a pipe cannot be searched; pass"),
        (["a.mp4", "b.mp4"], "QUESTION is missing after the videos: the last argument, b.mp4, is a file"),
        (["a.mp4", "b.mp4", " "], "QUESTION is empty"),
        (["a.mp4", "b.mp4", QUESTION, "--time"], "--time compares times on one video"),
        (["a.mp4", "http://x.org/b.mp4", QUESTION], "VIDEO http://x.org/b.mp4 is an address, which is downloaded only"),
        (["a.mp4", "b.mp4", QUESTION, "--output", "sheet.png"], "--output sheet.png must name a folder"),
        (["a.mp4", "b.mp4", QUESTION, "--output", "words.mp4"], "--output words.mp4 must name a folder"),
        (["a.mp4", "b.mp4", QUESTION, "--output", "words.mp4/x"], "--output words.mp4/x must be a folder that can"),
        (["a.mp4", "b.mp4", QUESTION, "--output", "folder"], "--output folder holds b.contact_sheet.png already"),
        (["a.mp4", "b.mp4", QUESTION, "--answers", "words.mp4"], "--answers words.mp4 is there already and is not"),
        (["a.mp4", QUESTION, "--answers", "words.mp4"], "--answers words.mp4 is there already and is not written over"),
        (["a.mp4", QUESTION, "--answers", "no/x.jsonl"], "--answers no/x.jsonl lies in a folder that does not exist"),
        (["a.mp4", QUESTION, "--output", "folder"], "--output folder must end in .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_come_before_anything_slow_and_lose_nothing(run, here, arguments, words):
    (here / "folder").mkdir()
    os.mkfifo(here / "pipe")
    (here / "folder" / "b.contact_sheet.png").write_text("mine")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("stts-hf run: error: ")
    assert words in line
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_one_video_may_have_an_answers_file_too(run, here):
    status, out, _ = run("a.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 0
    (row,) = rows(here / "answers.jsonl")
    assert re.search(rf"^answer: +{re.escape(row['answer'] or '(empty)')}$", out, re.M)
    assert (here / "contact_sheet.png").is_file()


def test_one_unreadable_video_is_in_the_answers_file(run, here):
    status, _, err = run("words.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 2
    (row,) = rows(here / "answers.jsonl")
    assert row["error"] in err


def test_answers_file_takes_names_that_are_no_text(run, here):
    video = b"\xff.mp4".decode("utf-8", "surrogateescape")
    try:
        shutil.copy(here / "a.mp4", here / video)
    except OSError:
        pytest.skip("this file system takes no such names")
    status, out, _ = run(video, "a.mp4", QUESTION, "--answers", "answers.jsonl")
    assert status == 0
    assert "[1/2] \\udcff.mp4" in out
    assert rows(here / "answers.jsonl")[0]["video"] == video
