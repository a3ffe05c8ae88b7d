"""Pushing with the real client to a Hub on loopback, and loading from there where `stts_hf` cannot be imported."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from stts_hf.hub.push import PushRefused, push_checkpoint
from tests.checkpoints import MESSAGES_CODE, TINY, load_tiny, prepare, write_small_clip
from tests.conftest import REPOSITORY, WITHOUT_PACKAGE
from tests.hub_server import LoopbackHub, Refusal, RequestHandler


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_small_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """The tiny checkpoint in shards."""
    folder = tmp_path_factory.mktemp("sharded")
    for file in TINY.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    load_tiny().save_pretrained(folder, max_shard_size="1MB")
    return folder


def start(hub, home: Path, *arguments: str, token: str | None = "write-token", **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=hub.environment(home, token) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def push(hub, home: Path, *arguments: object, token: str | None = "write-token", **environment: str):
    """Runs `stts-hf push`; returns exit status, output and the lines on stderr that are not progress."""
    command = ("-m", "stts_hf.cli.main", "push", *map(str, arguments))
    process = start(hub, home, *command, token=token, **environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def run_python(hub, home: Path, code: str, *arguments: str) -> str:
    process = start(hub, home, "-c", code, *arguments, PYTHONPATH=str(REPOSITORY))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != "README.md"}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path not in ("README.md", ".gitattributes")}


LOAD = (
    MESSAGES_CODE
    + """
import json
import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoVideoProcessor

repository, revision, clip = sys.argv[1:]
options = {"trust_remote_code": True, "revision": revision}
processor = AutoProcessor.from_pretrained(repository, **options)
inputs = processor.apply_chat_template(
    messages(clip), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
seen = {
    "AutoConfig": type(AutoConfig.from_pretrained(repository, **options)).__name__,
    "AutoProcessor": type(processor).__name__,
    "AutoVideoProcessor": type(AutoVideoProcessor.from_pretrained(repository, **options)).__name__,
}
for name in ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
    model = getattr(transformers, name).from_pretrained(repository, **options).eval()
    seen[name] = [type(model).__name__, model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()]
with torch.no_grad():
    logits = model(**inputs).logits[0, -1]
print(json.dumps(seen | {"logits": logits.tolist()}))
"""
)


def test_a_fresh_process_without_the_package_loads_every_auto_class_by_revision(hub, tmp_path, clip, sharded):
    status, _, err = push(hub, tmp_path / "push", sharded, "user/tiny", "--revision", "v1")
    assert status == 0, err
    # `main` holds no checkpoint: only the revision asked for can have been loaded.
    assert without_card(hub.files("user/tiny", "main")) == {}
    seen = json.loads(run_python(hub, tmp_path / "load", WITHOUT_PACKAGE + LOAD, "user/tiny", "v1", str(clip)))
    inputs, model = prepare(clip), load_tiny()
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    assert len(tokens) == inputs["input_ids"].shape[1] + 8
    for name in ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        assert seen[name] == ["STTSForConditionalGeneration", tokens]
    classes = [seen[name] for name in ("AutoConfig", "AutoProcessor", "AutoVideoProcessor")]
    assert classes == ["STTSConfig", "STTSProcessor", "STTSVideoProcessor"]
    with torch.no_grad():
        # The same code on the same machine: only the process differs.
        torch.testing.assert_close(torch.tensor(seen["logits"]), model(**inputs).logits[0, -1], rtol=0, atol=1e-6)


def test_what_arrives_is_byte_for_byte_what_was_pushed(hub, tmp_path):
    status, out, _ = push(hub, tmp_path, TINY, "user/tiny", "--message", "First push")
    assert status == 0
    assert hub.repositories["user/tiny"].messages == ["initial commit", "First push"]
    assert without_card(hub.files("user/tiny")) == contents(TINY)
    assert hub.repositories["user/tiny"].branches["main"] in out
    assert not hub.repositories["user/tiny"].private


def test_a_private_repository_is_private(hub, tmp_path):
    assert push(hub, tmp_path, TINY, "user/tiny", "--private")[0] == 0
    assert hub.repositories["user/tiny"].private


def test_the_card_names_the_repository(hub, tmp_path, sharded):
    push(hub, tmp_path, sharded, "user/tiny")
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


def test_what_nobody_needs_stays_here(hub, tmp_path, sharded):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in contents(sharded).items():
        (folder / name).write_bytes(content)
    for name in ("checkpoint-5/model.safetensors", "training_args.bin", "optimizer.pt", ".cache/x", "_saving-config/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    status, _, err = push(hub, tmp_path / "home", folder, "user/tiny")
    assert status == 0
    assert without_card(hub.files("user/tiny")) == contents(sharded)
    assert "Left out: .cache, _saving-config, checkpoint-5, optimizer.pt, training_args.bin" in err


def test_a_push_that_is_killed_changes_nothing_and_can_be_repeated(hub, tmp_path, sharded):
    command = ("-m", "stts_hf.cli.main", "push", str(sharded), "user/tiny")
    process = start(hub, tmp_path, *command)
    hub.on_upload = lambda: os.kill(process.pid, signal.SIGKILL) if len(hub.uploads) == 2 else None
    process.communicate(timeout=120)
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
    "no_token": ("user/tiny", None, r"does not accept a push without a token.*hf auth login.*\(401"),
    "no_rights": ("user/tiny", "read-token", r"the token has no right to write to user/tiny.*\(403"),
    "foreign_namespace": ("other/tiny", "write-token", r"the token has no right to write to other/tiny.*\(403"),
    "foreign_repository": ("other/theirs", "write-token", r"the token has no right to write to other/theirs.*\(403"),
    "not_a_name": ("user/a b", "write-token", r"'user/a b' is no name of a repository"),
    "other_model": ("user/llama", "write-token", r"user/llama exists and holds a 'llama' model.*--overwrite"),
    "other_files": ("user/files", "write-token", r"user/files exists and holds other files.*--overwrite"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_clear_line_and_exit_status_2(hub, tmp_path, name):
    repository, token, message = REFUSALS[name]
    hub.create("other/theirs")
    hub.create("user/llama", {"config.json": b'{"model_type": "llama"}'})
    hub.create("user/files", {"data.txt": b"x"})
    before = {repo: hub.files(repo) for repo in hub.repositories}
    status, out, err = push(hub, tmp_path, TINY, repository, token=token)
    lines = [line for line in err.splitlines() if line and not line.startswith("Pushing")]
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


def test_offline_mode_is_one_line(hub, tmp_path):
    status, _, err = push(hub, tmp_path, TINY, "user/tiny", HF_HUB_OFFLINE="1")
    assert status == 2
    assert "HF_HUB_OFFLINE" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "holds no config.json"),
        ("model-00002", "lacks model-00002-of-"),
        ("model.safetensors.index.json", "holds no weights"),
        ("processing_stts.py", "lacks processing_stts.py"),
        ("processor_config.json", "lacks processor_config.json"),
    ],
)
def test_a_folder_that_would_not_load_is_refused(hub, tmp_path, sharded, remove, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in contents(sharded).items():
        if not name.startswith(remove):
            (folder / name).write_bytes(content)
    status, _, err = push(hub, tmp_path, folder, "user/tiny")
    assert status == 2
    assert message in err.splitlines()[-1]
    assert not hub.repositories


def test_a_card_with_broken_metadata_is_refused(hub, tmp_path, sharded):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in contents(sharded).items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("---\ntags: [a\n---\n")
    status, _, err = push(hub, tmp_path, folder, "user/tiny")
    assert status == 2
    assert "README.md" in err.splitlines()[-1]


PUSH_METHODS = """
import sys
from stts_hf import STTSForConditionalGeneration, STTSProcessor
parts = {"model": STTSForConditionalGeneration, "processor": STTSProcessor}
folder, how, order = sys.argv[1:]
for part in order.split(","):
    loaded = parts[part].from_pretrained(folder)
    if how == "push_to_hub":
        loaded.push_to_hub("user/tiny")
    else:
        loaded.save_pretrained(sys.argv[1] + "-saved/tiny", push_to_hub=True, repo_id="user/tiny")
"""


@pytest.mark.parametrize(
    ("how", "order"),
    [("push_to_hub", "model,processor"), ("push_to_hub", "processor,model"), ("save_pretrained", "model,processor")],
)
def test_push_to_hub_of_model_and_processor_gives_a_whole_repository(hub, tmp_path, sharded, how, order):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, content in contents(sharded).items():
        (folder / name).write_bytes(content)
    run_python(hub, tmp_path / "home", PUSH_METHODS, str(folder), how, order)
    files = hub.files("user/tiny")
    assert without_card(files).keys() == contents(TINY).keys()
    code = {name: content for name, content in files.items() if name.endswith(".py")}
    assert code == {name: content for name, content in contents(TINY).items() if name.endswith(".py")}
    card: Any = ModelCard(files["README.md"].decode())
    assert card.data.pipeline_tag == "video-text-to-text"
    assert "| `pruning_layer` | 3 " in card.text


PUSH_AGAIN = """
import sys
from stts_hf import STTSForConditionalGeneration
model = STTSForConditionalGeneration.from_pretrained(sys.argv[1])
for branch in (None, "v1"):
    model.push_to_hub("user/tiny", revision=branch)
    model.push_to_hub("user/tiny", max_shard_size="1MB", revision=branch, commit_message="In shards")
model.save_pretrained(sys.argv[2], push_to_hub=True, repo_id="user/tiny")
"""


def test_push_to_hub_leaves_no_weights_that_would_be_read_in_place_of_its_own(hub, tmp_path, sharded):
    hub.create("user/tiny", {"README.md": b"mine", "adapter_model.safetensors": b"mine too"})
    run_python(hub, tmp_path / "home", PUSH_AGAIN, str(TINY), str(tmp_path / "saved"))
    weights = {name for name in contents(sharded) if name.startswith("model") and not name.endswith(".py")}

    def found(revision: str) -> set[str]:
        return {name for name in hub.files("user/tiny", revision) if "safetensors" in name}

    assert found("v1") == weights | {"adapter_model.safetensors"}
    assert found("main") == {"model.safetensors", "adapter_model.safetensors"}
    assert hub.files("user/tiny")["README.md"].endswith(b"mine")  # transformers adds tags
    repository = hub.repositories["user/tiny"]
    assert repository.messages.count("In shards") == 2
    # In one commit: no revision holds both.
    for files in repository.commits.values():
        assert not {"model.safetensors", "model.safetensors.index.json"} <= files.keys()


FAILING_PUSH = """
import sys
from stts_hf import STTSForConditionalGeneration, STTSProcessor
parts = {"model": STTSForConditionalGeneration, "processor": STTSProcessor}
source, folder, part, how = sys.argv[1:]
arguments = (True, None, True) if part == "model" else (True,)
loaded = parts[part].from_pretrained(source)
try:
    if how == "positional":
        loaded.save_pretrained(folder, *arguments, repo_id="user/tiny")
    else:
        loaded.save_pretrained(folder, push_to_hub=True, repo_id="user/tiny")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("how", ["keyword", "positional"])
@pytest.mark.parametrize("part", ["model", "processor"])
def test_a_failed_push_keeps_what_was_saved(hub, tmp_path, monkeypatch, part, how):
    def refuse(self, **groups):
        raise Refusal(403, "no commits today")

    monkeypatch.setattr(RequestHandler, "commit", refuse)
    folder = tmp_path / "tiny"
    out = run_python(hub, tmp_path / "home", FAILING_PUSH, str(TINY), str(folder), part, how)
    assert out.strip() == "HfHubHTTPError"
    saved = contents(folder)
    wanted = {"config.json", "model.safetensors"} if part == "model" else {"processor_config.json", "tokenizer.json"}
    assert wanted <= saved.keys()
    assert {name for name in saved if name.endswith(".py")} == {file.name for file in TINY.glob("*.py")}
    assert not list(folder.glob("_saving*"))
    if part == "model":
        load_tiny(folder)


SAVE_AND_PUSH = """
import sys
from stts_hf import STTSForConditionalGeneration
source, folder, how = sys.argv[1:]
model = STTSForConditionalGeneration.from_pretrained(source)
if how == "positional":
    model.save_pretrained(folder, True, None, True)
else:
    model.save_pretrained(folder, push_to_hub=True)
"""


@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_a_save_pushes_only_what_it_saved_to_a_repository_of_the_folders_name(hub, tmp_path, how):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "notes.txt").write_text("private")
    (folder / "README.md").write_text("mine")
    run_python(hub, tmp_path / "home", SAVE_AND_PUSH, str(TINY), str(folder), how)
    files = hub.files("user/tiny")
    assert {"config.json", "model.safetensors", "modeling_stts.py"} <= files.keys()
    assert "notes.txt" not in files
    assert files["README.md"] == b"mine"
    assert (folder / "README.md").read_text() == "mine"


TRAIN = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.hub.trainer import ModelCardTrainerMixin
from tests.checkpoints import TINY, prepare

class CardTrainer(ModelCardTrainerMixin, Trainer):
    pass

clip, output, strategy, kind = sys.argv[1:]
inputs = prepare(clip)
labels = inputs["input_ids"].where(inputs["input_ids"] < 1024, -100)
arguments = TrainingArguments(
    output, max_steps=2, save_steps=1, report_to="none", use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
    push_to_hub=True, hub_model_id="user/trained", hub_strategy=strategy, hub_always_push=True,
)
trainer = {"plain": Trainer, "card": CardTrainer}[kind](
    STTSForConditionalGeneration.from_pretrained(TINY),
    arguments,
    train_dataset=[dict(inputs, labels=labels)] * 2,
    data_collator=lambda samples: samples[0],
    processing_class=STTSProcessor.from_pretrained(TINY),
)
trainer.train()
if strategy == "end":
    trainer.push_to_hub()
else:
    trainer._finish_current_push()
torch.save(trainer.model.state_dict(), output + "/state.pt")
"""


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("end", "card"),
        ("end", "plain"),
        ("every_save", "plain"),
        ("checkpoint", "plain"),
        ("all_checkpoints", "plain"),
    ],
)
def test_trainer_pushes_a_whole_repository(hub, tmp_path, clip, strategy, kind):
    output = tmp_path / "run"
    run_python(hub, tmp_path / "home", TRAIN, str(clip), str(output), strategy, kind)
    files = hub.files("user/trained")
    assert contents(TINY).keys() <= files.keys()
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    trained = torch.load(output / "state.pt")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in load_tiny(folder).state_dict().items())
    if strategy == "end":
        card: Any = ModelCard(files["README.md"].decode())
        assert card.data.library_name == "transformers"
        assert {"stts", "generated_from_trainer"} <= set(card.data.tags)
    else:
        assert "| `pruning_layer` | 3 " in files["README.md"].decode()
    wanted = {"checkpoint": ["last-checkpoint"], "all_checkpoints": ["checkpoint-1", "checkpoint-2"]}.get(strategy, [])
    assert {path.split("/")[0] for path in files if "/" in path} == set(wanted)
    for name in wanted:
        assert contents(TINY).keys() <= contents(folder / name).keys()
        assert {"optimizer.pt", "trainer_state.json"} <= contents(folder / name).keys()  # training can go on from it
        assert torch.equal(load_tiny(folder / name).lm_head.weight, trained["lm_head.weight"]) == (
            name != "checkpoint-1"
        )
    if kind == "card":
        assert card.data.pipeline_tag == "video-text-to-text"
        assert "| `pruning_layer` | 3 " in card.text
        assert "learning_rate" in card.text


DAMAGED = {
    "cut_config": ("config.json", lambda text: text[:50], "config.json is damaged"),
    "list_config": ("config.json", lambda text: "[]", "config.json holds no JSON object"),
    "null_auto_map": (
        "config.json",
        lambda text: json.dumps(json.loads(text) | {"auto_map": None}),
        "lacks an auto_map",
    ),
    "list_auto_map": ("config.json", lambda text: json.dumps(json.loads(text) | {"auto_map": []}), "lacks an auto_map"),
    "cut_index": ("model.safetensors.index.json", lambda text: text[:50], "index.json is damaged"),
    "cut_processor": ("processor_config.json", lambda text: text[:50], "processor_config.json is not valid JSON"),
    "list_weight_map": ("model.safetensors.index.json", lambda text: '{"weight_map": []}', "is not the index"),
    "no_scoring": ("scoring_stts.py", None, "scoring_stts.py is missing"),
    "no_tokenizer": ("tokenizer.json", None, "tokenizer.json is missing"),
    "no_chat_template": ("chat_template.jinja", None, "chat_template.jinja is missing"),
    "cut_weights": ("model-00001", lambda text: text[:5000], "is cut off"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_before_anything_is_created(sharded, tmp_path, name):
    file, change, message = DAMAGED[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    for entry, content in contents(sharded).items():
        if not entry.startswith(file):
            (folder / entry).write_bytes(content)
        elif change is not None:
            (folder / entry).write_bytes(change(content.decode("latin-1")).encode("latin-1"))
    with pytest.raises(PushRefused, match=re.escape(message)) as refused:
        push_checkpoint(folder, "user/tiny", endpoint="http://127.0.0.1:1")  # nothing listens there
    assert "\n" not in str(refused.value)
    assert "; " in str(refused.value)  # a remedy
