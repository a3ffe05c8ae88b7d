"""What the code in a checkpoint does beside its work: nothing. Python's audit hooks say so, and strace, which also sees
what C code asks of the kernel."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import TINIES, write_small_clip
from tests.conftest import WITHOUT_PACKAGE

# A process without the package, in which the Hub is not switched off: what would be fetched shows.
CODE = """
import json, os, sys

seen = []
KINDS = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "pty.", "shutil.",
         "tempfile.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.")
CHANGES = {"mkdir", "rmdir", "remove", "rename", "link", "symlink", "truncate", "chmod", "chown", "utime", "setxattr"}

def note(event, arguments):
    kind, _, name = event.partition(".")
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes:
            seen.append((event, str(path)))
    elif event.startswith(KINDS) or (kind == "os" and name in CHANGES):
        # what is copied, or renamed, goes where the second argument says
        places = arguments[1:2] if event in ("shutil.copyfile", "os.rename") else arguments[:1]
        seen.append((event, *map(str, places)))

def mark(phase):
    # Asks for a file that is not there: the trace of system calls shows what comes next.
    os.access("/phase/" + phase, os.F_OK)

def taken():
    found = [event for event in seen if not str(event[-1]).startswith(os.environ["HF_HOME"] + "/modules")]
    seen.clear()
    return found

import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

sys.addaudithook(note)
clip, *folders = sys.argv[1:]
report = {}
for folder in folders:
    mark("loading/" + os.path.basename(folder))
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMultimodalLM.from_pretrained(folder, trust_remote_code=True)
    loading, copied = taken(), model.__module__.startswith("transformers_modules.")
    mark("working/" + os.path.basename(folder))
    content = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    video, options = clip, {}
    if not type(processor).__module__.startswith("transformers_modules."):  # native ones read files with torchcodec
        video = torch.randint(0, 256, (6, 3, 64, 96), dtype=torch.uint8)
        metadata = [{"fps": 2.0, "frames_indices": list(range(6)), "total_num_frames": 6}]
        options = {"video_metadata": metadata, "do_sample_frames": False}
    inputs = processor(text=[prompt], videos=[video], return_tensors="pt", **options)
    model.generate(**inputs, max_new_tokens=3, pruning_ratio=0.5)
    model(**inputs, pruning_ratio=0.5)
    mark("between")
    report[folder] = {"copied": copied, "loading": loading, "working": taken()}

# What is looked for, so that it is known to be seen. The last is C++ that opens a file, which no hook of Python sees.
import socket, subprocess, tempfile
for number, act in enumerate((
    lambda: open("written", "w"),
    lambda: os.open("opened", os.O_WRONLY | os.O_CREAT),
    lambda: os.mkdir("folder"),
    lambda: tempfile.TemporaryFile(),
    lambda: subprocess.Popen(["true"]).wait(),
    lambda: os.system("true"),
    lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
    lambda: torch._C.PyTorchFileWriter("weights").write_end_of_file(),
)):
    mark(f"control/{number}")
    try:
        act()
    except OSError:
        pass
    report.setdefault("control", []).append(bool(taken()))
print(json.dumps(report))
"""


# They look, or end; sendfile fills a file or connection that was opened, which the trace shows.
HARMLESS = {"access", "faccessat", "faccessat2", "stat", "lstat", "newfstatat", "statx", "statfs", "readlink",
            "readlinkat", "getcwd", "exit", "exit_group", "wait4", "waitid", "sendfile"}  # fmt: skip
# Files, connections and processes; then what changes a file that is open, or would pass the trace by.
TRACED = "trace=%file,%network,%process,fchmod,fchown,fsetxattr,fremovexattr,memfd_create,io_uring_setup"


def run_traced(folder: Path, *before: str) -> str:
    """What `CODE` prints, run behind a command like strace."""
    environment = {**os.environ, "HF_HOME": str(folder)}
    for name in ("HF_HUB_OFFLINE", "HF_MODULES_CACHE"):
        environment.pop(name, None)
    # -B: Python keeps no bytecode of what it imports
    command = [*before, sys.executable, "-B", "-c", WITHOUT_PACKAGE + CODE, str(write_small_clip(folder))]
    ran = subprocess.run(
        [*command, *map(str, TINIES.values())],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return json.loads(run_traced(tmp_path_factory.mktemp("traced")).splitlines()[-1])


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """Phase to the system calls in it that do more than read, but for those that are allowed."""
    if shutil.which("strace") is None:
        pytest.skip("needs the strace command")
    if (tried := subprocess.run(["strace", "-qq", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"strace may trace nothing here: {tried.stderr.strip()}")
    folder = tmp_path_factory.mktemp("strace")
    run_traced(folder, "strace", "-f", "-qq", "-s", "4096", "-e", TRACED, "-o", str(folder / "trace"))
    phase, found = "before", dict[str, list[str]]()
    for line in (folder / "trace").read_text().splitlines():
        if not (call := re.match(r"\d+ +(\w+)\((.*)", line)):
            continue  # the second half of a call that another thread interrupted, or a signal
        name, arguments = call.groups()
        paths = [os.path.normpath(path) for path in re.findall(r'"([^"]*)"', arguments)]
        if name in ("access", "faccessat", "faccessat2") and paths[0].startswith("/phase/"):
            phase = paths[0].removeprefix("/phase/")
            found[phase] = []
        elif phase != "before" and not is_allowed(name, arguments, paths, folder):
            found[phase].append(line)
    return found


def is_allowed(name: str, arguments: str, paths: list[str], home: Path) -> bool:
    if name in HARMLESS or (name.startswith("open") and not re.search("O_(WRONLY|RDWR|CREAT|TRUNC)", arguments)):
        return True
    if name.startswith("clone"):
        return "CLONE_THREAD" in arguments
    # The copy of the code that transformers makes, and the semaphore of tqdm's lock, for the bar while weights load.
    allowed = rf"{re.escape(str(home))}(/modules(/.*)?)?|/dev/shm/sem\..*"
    return bool(paths) and all(re.fullmatch(allowed, path) for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", TINIES)
def test_remote_code_writes_nothing_connects_nowhere_and_starts_nothing(report, backbone):
    """But for the copy of the code that transformers makes in its own folder of modules."""
    assert report[str(TINIES[backbone])] == {"copied": True, "loading": [], "working": []}


@pytest.mark.slow
def test_the_hooks_see_what_they_look_for(report):
    assert report["control"] == [True] * 7 + [False]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", TINIES)
@pytest.mark.parametrize("phase", ["loading", "working"])
def test_the_kernel_sees_no_more(phases, phase, backbone):
    assert phases[f"{phase}/{TINIES[backbone].name}"] == []


@pytest.mark.slow
def test_the_trace_of_system_calls_sees_what_it_looks_for(phases):
    assert [bool(phases[f"control/{number}"]) for number in range(8)] == [True] * 8
