"""The command line on the tiny checkpoint: what it prints, what it writes, and how it says no."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from examples.clips.sample_clip import draw_sample_clip
from stts_hf.cli.main import main
from tests.checkpoints import ALL_TINIES, OTHERS, QWENS

# 2 seconds at 4 frames per second, and the last frame: 0, 0.2, 0.5, 0.7, ... 1.7 s and the end.
NUM_FRAMES, NUM_TOKENS = 9, 9 * 16


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    draw_sample_clip(path, seconds=2.0, fps=10, size=(64, 96))
    return path


@pytest.fixture
def run(clip, hub_configs, tmp_path, capsys):
    """Runs the command on the clip; returns exit status, stdout, stderr and the picture's path."""

    def run(
        *arguments: str,
        video: Path | str = clip,
        checkpoint: Path | str = hub_configs / "stts-tiny",
        question: str = "What moves?",
    ):
        sheet = tmp_path / "sheet.png"
        command = ["run", str(video), question, "--checkpoint", str(checkpoint), "--output", str(sheet)]
        status = main([*command, "--max-new-tokens", "3", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err, sheet

    return run


def test_it_answers_counts_and_draws(run):
    status, out, err, sheet = run()
    assert status == 0
    assert re.search(r"^question: +What moves\?$", out, re.M)
    assert re.search(r"^answer: +\S", out, re.M)
    assert re.search(r"^frames: +9 sampled from 0\.00 s to 1\.90 s of a video of 2\.00 s$", out, re.M)
    # floor(0.5 * 144) = 72 of 144 are dropped.
    assert re.search(r"^video tokens: +72 of 144 kept", out, re.M)
    left, whole = map(int, re.findall(r"prompt: +(\d+) of (\d+) tokens", out)[0])
    assert whole - left == 72
    assert str(sheet) in out
    with Image.open(sheet) as image:
        assert image.width > 600
    assert "stock model" not in out + err  # nobody asked for times


@pytest.mark.parametrize("other", [*QWENS, *OTHERS])
def test_another_backbone_takes_the_same_command(run, other):
    """Of 20 frames in 2 s four, in two tubelets of 4 x 6 blocks, in the size they have; SmolVLM2 shows 8."""
    frames, kept, of_all = (8, 64, 128) if other == "smolvlm" else (4, 24, 48)
    tiny, last = ALL_TINIES[other], "1.5" if other == "qwen2_5_vl" else "1.9"  # native sampling, not alike
    status, out, _, sheet = run("--time", checkpoint=tiny)
    assert status == 0
    assert re.search(rf"^frames: +{frames} sampled from 0\.00 s to {last}0 s of a video of 2\.00 s$", out, re.M)
    assert re.search(rf"^video tokens: +{kept} of {of_all} kept", out, re.M)
    ((reach, whole),) = re.findall(r"^prompt: +(\d+) of (\d+) tokens", out, re.M)
    assert re.search(rf"^stock model +{whole} ", out, re.M)
    assert re.search(rf"^STTS, 50% dropped +{reach} .*\(-\d+%\)$", out, re.M)
    with Image.open(sheet) as image:
        assert image.width > 600
    # ceil(2 / (1 - 0.5)) = 4
    scaled = ("--num-frames", "2", "--test-time-scaling", "--pruning-ratio", "0.5")
    assert "4 sampled" in run(*scaled, checkpoint=tiny)[1]


@pytest.mark.parametrize(("ratio", "kept"), [("0.9", 16), ("1", 0)])
def test_pruning_ratio(run, ratio, kept):
    # At 0.9 the budget exceeds all frames but the first, which then stays in full; at 1 that goes too.
    status, out, _, _ = run("--pruning-ratio", ratio)
    assert status == 0
    assert f"{kept} of {NUM_TOKENS} kept" in out


def test_an_address_is_read_only_where_that_is_allowed(run):
    status, out, err, _ = run(video="https://example.com/clip.mp4")
    assert (status, out) == (2, "")
    assert "https://example.com/clip.mp4 is a URL" in err
    assert "--allow-urls" in err


def test_times_compare_the_stock_model_with_and_without_dropping(run):
    _, out, err, _ = run("--time")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines() if line.startswith(("stock", "STTS"))]
    assert [row[0] for row in rows] == 2 * ["stock model", "STTS, none dropped", "STTS, 50% dropped"]
    ((reach, whole),) = re.findall(r"^prompt: +(\d+) of (\d+) tokens", out, re.M)
    assert [row[1] for row in rows[:3]] == [whole, whole, reach]  # what is certain comes first
    assert int(rows[2][2]) < int(rows[0][2])  # bytes of the cache
    assert all(re.fullmatch(r"\S+ \(-\d+%\)", cell) for cell in rows[2][3:])
    for row in rows[3:]:
        cells = [re.fullmatch(r"\d+\.\d \(\d+\.\d-\d+\.\d\)( \d+\.\d\dx| rounds disagree)?", cell) for cell in row[1:]]
        assert len(cells) == 3
        assert all(cell is not None and bool(cell[1]) == (row is not rows[3]) for cell in cells)
    assert "too small" in err
    assert "\r" not in err  # no progress bar in a log


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        (["--test-time-scaling", "--pruning-ratio", "1"], {}, "needs a pruning_ratio below 1"),
        (["--output", "sheet.txt"], {}, "sheet.txt"),
        (["--device", "abacus"], {}, "--device abacus"),
        ([], {"question": "What is <|video|>?"}, "question holds '<|video|>'"),
        ([], {"checkpoint": "./no_such_folder"}, "no_such_folder"),
        ([], {"checkpoint": "hub_configs/stts-molmo2-4b"}, "holds no weights"),
    ],
    ids=str,
)
def test_bad_options_are_one_clear_line(run, arguments, given, words):
    status, out, err, _ = run(*arguments, **given)
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("stts-hf run: error: ")
    assert words in last
    assert "Traceback" not in err


@pytest.mark.parametrize(("option", "value"), [("--pruning-ratio", "nan"), ("--num-frames", "0")])
def test_values_out_of_range_are_one_clear_line(run, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        run(option, value)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"stts-hf run: error: argument {option}: is {value}, but must be ")


# In a process of its own: `stts-hf run` once, and then while memory may grow by so many MiB.
IN_LITTLE_MEMORY = """
import contextlib, io, json, resource, sys
import psutil, torch
from stts_hf.cli.main import main
torch.set_num_threads(1)
assert main(sys.argv[1:]) == 0
before = resource.getrlimit(resource.RLIMIT_DATA)
for more in (0, 2, 1000):
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + more * 2**20, before[1]))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = main(sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_DATA, before)
    print(json.dumps([status, out.getvalue()]), file=sys.stderr)
"""
# Ends, as by SIGKILL, where half of the picture is written.
KILLED = """
import os, pathlib, signal, sys
from PIL import Image
from stts_hf.cli.main import main

def save(image, path):
    pathlib.Path(path).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

Image.Image.save = save
main(sys.argv[1:])
"""


def in_a_process(code: str, *words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA bounds a process's memory on Linux")
def test_a_process_whose_memory_is_used_up_says_so_and_can_go_on(clip, hub_configs, tmp_path):
    words = ["run", clip, "What moves?", "--checkpoint", hub_configs / "stts-tiny", "--output", tmp_path / "sheet.png"]
    ended = in_a_process(IN_LITTLE_MEMORY, *words)
    assert ended.returncode == 0, ended.stderr
    *short, enough = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("[")]
    for status, said in short:
        assert status == 2
        assert re.match(r"stts-hf run: error: out of memory \(.*\): try fewer --num-frames", said.splitlines()[-1])
    assert len(short) == 2
    assert enough[0] == 0


@pytest.mark.slow
def test_a_kill_while_the_picture_is_written_leaves_the_earlier_one(run, clip, hub_configs, tmp_path):
    run()
    sheet = tmp_path / "sheet.png"
    before = sheet.read_bytes()
    words = ["run", clip, "What moves?", "--checkpoint", hub_configs / "stts-tiny", "--output", sheet]
    assert in_a_process(KILLED, *words).returncode == -signal.SIGKILL
    assert sheet.read_bytes() == before
    assert run()[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]  # what the kill left is gone
