"""What commands answer before they load PyTorch: help, and wrong arguments. Here no test imports it."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from stts_hf.visualize.sample_clip import write_sample_clip
from tests.conftest import REPOSITORY

# Runs the commands of stdin, a JSON list of words each; prints status, output and whether PyTorch was loaded.
SEVERAL = """
import contextlib, io, json, sys
from stts_hf.cli.main import main
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = main(json.loads(line))
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), "torch" in sys.modules]))
"""
COMMANDS = ["run", "predict", "calibrate", "visualize", "demo", "convert", "doctor", "push", "bench", "train", "eval"]
ASK = ["run", "clip.mp4", "What moves?"]
TINY = str(REPOSITORY / "hub_configs" / "stts-tiny")
# What is typed, and what the last line of the answer holds.
WRONG = {
    "a command": (["runn"], "Did you mean 'run'?"),
    "an option": ([*ASK, "--chekpoint", TINY], "Did you mean '--checkpoint'?"),
    "a selector": ([*ASK, "--selector", "cosin"], "Did you mean 'cosine'?"),
    "a preset": (["bench", "--preset", "towr"], "Did you mean 'tower'?"),
    "a share above 1": (
        [*ASK, "--pruning-ratio", "50"],
        "a share from 0 (drop nothing) to 1 (drop all), as 0.5 or 50%",
    ),
    "a word for a share": ([*ASK, "--pruning-ratio", "half"], "must be a share such as 0.5 or 50%"),
    "no such folder": ([*ASK, "--checkpoint", "./gone"], "checkpoint ./gone is not a folder"),
    "a folder of other files": ([*ASK, "--checkpoint", "others"], "has no config.json"),
    "a name without a network": ([*ASK, "--checkpoint", "nope"], "is not a folder, and the Hub cannot be reached"),
    "a text as a video": (["run", "notes.mp4", "What?", "--checkpoint", TINY], "is not a video of a known format"),
    "the same for a page": (["visualize", "notes.mp4", "--output", "seen"], "is not a video of a known format"),
    "a URL": (["run", "https://localhost/a.mp4", "What?"], "allow its download with --allow-urls"),
    "a share to keep": (["calibrate", TINY, "videos"], "the following arguments are required: --keep"),
    "a place to write to": (
        ["calibrate", "user/name", "videos", "--keep", "0.2", "--write"],
        "--write needs a folder with a config.json of its own",
    ),
    "a URL among many": (["predict", "https://localhost/a.mp4", "--prompt", "What?"], "--allow-urls"),
    "a configuration that is not there": (["train", "gone.yaml"], "there is no such file"),
    "rows that are not there": (["eval", "gone.jsonl"], "does not exist"),
    "a folder to check that is not there": (["doctor", "gone"], "is not a folder"),
    "a folder to push that is not there": (["push", "gone", "user/name"], "is not a folder"),
}
if not any(Path("/dev").glob("nvidia*")):
    for command in (ASK, ["bench"], ["demo", "--port", "0"], ["predict", "clip.mp4", "--prompt", "What?"]):
        WRONG[f"a GPU for {command[0]}"] = ([*command, "--device", "cuda:1"], "PyTorch finds no CUDA GPU")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, bool]]:
    """Of each of `WRONG`, and of no command at all: exit status, output, whether PyTorch was loaded."""
    folder = tmp_path_factory.mktemp("here")
    write_sample_clip(folder / "clip.mp4")
    (folder / "notes.mp4").write_text("no video\n")
    (folder / "others").mkdir()
    (folder / "others" / "link.md").symlink_to("/etc/hostname")
    typed = [[], *(words for words, _ in WRONG.values())]
    ran = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        input="\n".join(map(json.dumps, typed)),
        cwd=folder,
        # Nothing listens on the discard port of this machine.
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(["nothing", *WRONG], map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_answered_without_pytorch(answers, what):
    status, said, loaded = answers[what]
    assert status == 2
    assert WRONG[what][1] in said.splitlines()[-1]
    assert not loaded


def test_a_name_is_a_folder_first_and_then_asked_for_once(answers):
    _, said, _ = answers["a name without a network"]
    assert said.startswith("There is no folder nope here\n")
    assert "Retrying" not in said


def test_no_command_prints_the_help(answers):
    status, said, loaded = answers["nothing"]
    assert (status, loaded) == (0, False)
    assert all(f"\n    {command}" in said for command in COMMANDS)


# Prints what a command's help imports.
IMPORTED = """
import sys
before = set(sys.modules)
from stts_hf.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    print(*sys.modules.keys() - before, file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_little(command):
    """No package but this one, and of the standard library nothing that compresses, connects or runs processes."""
    words = [command, "--help"] if command else ["--help"]
    ran = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in ran.stderr.split()}
    assert imported - sys.stdlib_module_names <= {"stts_hf"}
    assert not imported & {"asyncio", "bz2", "concurrent", "json", "logging", "shutil", "subprocess"}
    assert len(ran.stderr.split()) < 80


def cpu_seconds(*command: str) -> float:
    """Of the process alone: what else runs counts only as far as it takes caches away."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    usage = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_takes_at_most_five_times_what_python_takes_to_do_nothing(command):
    words = ["-m", "stts_hf.cli.main", *filter(None, [command]), "--help"]
    pairs = [(cpu_seconds(*words), cpu_seconds("-c", "pass")) for _ in range(15)]  # one after the other: as busy
    assert statistics.median(helped / nothing for helped, nothing in pairs) <= 5
