"""What the code in a checkpoint does beside its work, as Python itself reports it: nothing."""

import json
import os
import subprocess
import sys

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
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMultimodalLM.from_pretrained(folder, trust_remote_code=True)
    loading, copied = taken(), model.__module__.startswith("transformers_modules.")
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
    report[folder] = {"copied": copied, "loading": loading, "working": taken()}

# What the hook is for, so that it is known to see it.
import socket, subprocess, tempfile
for act in (
    lambda: open("written", "w"),
    lambda: os.open("opened", os.O_WRONLY | os.O_CREAT),
    lambda: os.mkdir("folder"),
    lambda: tempfile.TemporaryFile(),
    lambda: subprocess.Popen(["true"]).wait(),
    lambda: os.system("true"),
    lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
):
    try:
        act()
    except OSError:
        pass
    report.setdefault("control", []).append(bool(taken()))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    environment = {**os.environ, "HF_HOME": str(folder)}
    for name in ("HF_HUB_OFFLINE", "HF_MODULES_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-B", "-c", WITHOUT_PACKAGE + CODE, str(write_small_clip(folder))]
    ran = subprocess.run(
        [*command, *map(str, TINIES.values())],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("backbone", TINIES)
def test_remote_code_writes_nothing_connects_nowhere_and_starts_nothing(report, backbone):
    """But for the copy of the code that transformers makes in its own folder of modules."""
    assert report[str(TINIES[backbone])] == {"copied": True, "loading": [], "working": []}


def test_the_trace_sees_what_it_looks_for(report):
    assert report["control"] == [True] * 7
