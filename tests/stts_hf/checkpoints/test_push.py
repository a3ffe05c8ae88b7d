"""`stts-hf push` with the real client to a Hub on loopback; tests/test_chain.py loads what was pushed."""

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from stts_hf.checkpoints.push import PushRefused, push_checkpoint
from tests.checkpoints import TINY
from tests.stts_hf.checkpoints.pushing import contents, push, start, without_card, write_files


def test_a_branch_gets_the_checkpoint_and_main_does_not(hub, tmp_path, sharded):
    status, _, err = push(hub, tmp_path, sharded, "user/tiny", "--revision", "v1")
    assert status == 0, err
    assert without_card(hub.files("user/tiny", "v1")) == contents(sharded)
    assert without_card(hub.files("user/tiny", "main")) == {}


def test_what_arrives_is_byte_for_byte_what_was_pushed(hub, tmp_path, any_folder):
    status, out, _ = push(hub, tmp_path, any_folder, "user/tiny", "--message", "First push")
    assert status == 0
    assert hub.repositories["user/tiny"].messages == ["initial commit", "First push"]
    assert without_card(hub.files("user/tiny")) == contents(any_folder)
    assert hub.repositories["user/tiny"].branches["main"] in out
    assert not hub.repositories["user/tiny"].private


def test_a_private_repository_is_private_and_has_a_card(hub, tmp_path):
    assert push(hub, tmp_path, TINY, "user/tiny", "--private")[0] == 0
    assert hub.repositories["user/tiny"].private
    card: Any = ModelCard(hub.files("user/tiny")["README.md"].decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "video-text-to-text")


def test_pushing_again_uploads_nothing_and_commits_nothing(hub, tmp_path):
    push(hub, tmp_path, TINY, "user/tiny")
    uploads, commits = list(hub.uploads), len(hub.repositories["user/tiny"].commits)
    status, _, err = push(hub, tmp_path, TINY, "user/tiny")
    assert status == 0, err
    assert (hub.uploads, len(hub.repositories["user/tiny"].commits)) == (uploads, commits)


def test_weights_of_an_earlier_push_go(hub, tmp_path, sharded):
    push(hub, tmp_path, TINY, "user/tiny")
    push(hub, tmp_path, sharded, "user/tiny")
    assert without_card(hub.files("user/tiny")) == contents(sharded)
    push(hub, tmp_path, TINY, "user/tiny")
    assert without_card(hub.files("user/tiny")) == contents(TINY)


SOMEBODYS_OWN = (
    "id_rsa",
    "credentials.json",
    "hf_token.txt",
    "tokenizer_secret.json",
    ".env",
    "weights.pickle",
    "model.ckpt",
    "optimizer.pt",
    "training_args.bin",
    "trainer_state.json",
    "train.py",
    "model-00009-of-00009.safetensors",
    "wandb/run/config.json",
    "venv/bin/python",
    "data/rows.jsonl",
    "checkpoint-5/model.safetensors",
)


@pytest.fixture
def crowded(tmp_path, sharded) -> Path:
    """A checkpoint among files that are somebody's own, and links to a secret in the folder and out of it."""
    folder = write_files(tmp_path / "run", contents(sharded) | dict.fromkeys(SOMEBODYS_OWN, b"secret"))
    (folder / "notes").symlink_to(".env")
    (folder / "assets").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"secret")
    (folder / "LICENSE").write_text("terms")
    (folder / "curve.png").write_bytes(b"picture")
    return folder


def test_what_is_no_part_of_the_checkpoint_stays_here(hub, tmp_path, crowded, sharded):
    status, _, err = push(hub, tmp_path / "home", crowded, "user/tiny")
    assert status == 0, err
    expected = contents(sharded) | {"LICENSE": b"terms", "curve.png": b"picture"}
    assert without_card(hub.files("user/tiny")) == expected
    assert re.search(r"[\d.]+kB  config\.json", err)  # names and sizes come first
    stay = err.split("Staying here: ")[1].splitlines()[0].split(", ")
    assert {name.split("/")[0] for name in SOMEBODYS_OWN} | {"notes", "assets", "pipe"} <= {*stay}


def test_a_dry_run_says_what_would_go_and_creates_nothing(hub, tmp_path, crowded):
    status, out, err = push(hub, tmp_path / "home", crowded, "user/tiny", "--dry-run", "--include", "data/*")
    assert status == 0, err
    assert "nothing pushed" in out
    assert "data/rows.jsonl" in err
    assert not hub.repositories
    assert not hub.requests


def test_more_goes_where_it_is_named(hub, tmp_path, crowded):
    assert push(hub, tmp_path / "home", crowded, "user/tiny", "--include", "data/*")[0] == 0
    assert hub.files("user/tiny")["data/rows.jsonl"] == b"secret"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [("pipe", "pipe"), ("caf*", r"caf\udce9"), ("assets", "assets"), ("notes", "notes"), ("nothing*", "nothing*")],
)
def test_what_cannot_go_is_one_line_before_a_repository_is_created(hub, tmp_path, crowded, pattern, named):
    status, _, err = push(hub, tmp_path / "home", crowded, "user/tiny", "--include", pattern)
    assert status == 2
    assert named in err.splitlines()[-1]
    assert not hub.repositories


@pytest.mark.slow
def test_a_push_that_is_killed_changes_nothing_and_can_be_repeated(hub, tmp_path, sharded):
    command = ("-m", "stts_hf.cli.main", "push", str(sharded), "user/tiny")
    process = start(hub, tmp_path, *command)
    hub.on_upload = lambda: os.kill(process.pid, signal.SIGKILL) if len(hub.uploads) == 2 else None
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert list(hub.files("user/tiny")) == [".gitattributes"]
    received = set(hub.uploads)
    hub.uploads.clear()
    hub.on_upload = lambda: None
    assert push(hub, tmp_path, sharded, "user/tiny")[0] == 0
    assert without_card(hub.files("user/tiny")) == contents(sharded)
    assert not received & set(hub.uploads)


REFUSALS = {
    "wrong_token": ("user/tiny", "wrong", r"does not accept the token.*hf auth login.*\(401"),
    "no_rights": ("user/tiny", "read-token", r"the token has no right to write to user/tiny.*\(403"),
    "foreign_repository": ("other/theirs", "write-token", r"the token has no right to write to other/theirs.*\(403"),
    "not_a_name": ("user/a b", "write-token", r"does not accept this: Repo id must .*'user/a b'"),
    "other_model": ("user/llama", "write-token", r"user/llama exists and holds a 'llama' model.*--overwrite"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_clear_line_and_exit_status_2(hub, tmp_path, name):
    repository, token, message = REFUSALS[name]
    hub.create("other/theirs")
    hub.create("user/llama", {"config.json": b'{"model_type": "llama"}'})
    before = {repo: hub.files(repo) for repo in hub.repositories}
    status, out, err = push(hub, tmp_path, TINY, repository, token=token)
    lines = [line for line in err.splitlines() if "error: " in line]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert re.search(message, lines[0])
    assert "write-token" not in err
    assert {repo: hub.files(repo) for repo in hub.repositories} == before


def test_overwrite_replaces_another_model(hub, tmp_path):
    hub.create("user/llama", {"config.json": b'{"model_type": "llama"}'})
    assert push(hub, tmp_path, TINY, "user/llama", "--overwrite")[0] == 0
    assert without_card(hub.files("user/llama")) == contents(TINY)


def test_private_does_not_push_into_a_public_repository(hub, tmp_path):
    hub.create("user/tiny")
    status, _, err = push(hub, tmp_path, TINY, "user/tiny", "--private")
    assert status == 2
    assert "user/tiny exists and is public" in err
    assert list(hub.files("user/tiny")) == [".gitattributes"]


def test_a_hub_that_is_not_there_is_one_line(hub, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    status, _, err = push(hub, tmp_path, TINY, "user/tiny", HF_ENDPOINT=url)
    assert status == 2
    assert re.search(rf"error: {url} cannot be reached \(.+\); nothing was committed", err.splitlines()[-1])


def test_a_folder_that_would_not_load_is_refused(hub, tmp_path, sharded):
    left = {name: content for name, content in contents(sharded).items() if not name.startswith("model-00002")}
    folder = write_files(tmp_path / "folder", left)
    status, _, err = push(hub, tmp_path, folder, "user/tiny")
    assert status == 2
    assert "is missing, and model.safetensors.index.json names it" in err.splitlines()[-1]
    assert not hub.repositories


def test_a_file_of_the_checkpoint_that_is_a_link_to_something_else_is_refused(sharded, tmp_path):
    folder = write_files(tmp_path / "folder", contents(sharded) | {".env": b"secret"})
    (folder / "LICENSE").symlink_to(".env")
    with pytest.raises(PushRefused, match="LICENSE is a link"):
        push_checkpoint(folder, "user/tiny", endpoint="http://127.0.0.1:1")  # nothing listens there
