"""
Ways to break a checkpoint's folder, times the commands that load one: no traceback, no hang, no foreign code, no
question whether to run it, no answer from made-up weights, but one sentence that names the file.
"""

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stts_hf.cli.main import main
from tests.checkpoints import TINY, write_small_clip
from tests.training_files import write_config, write_data

Damage = Callable[[Path], object]
COMMANDS = ("run", "predict", "doctor", "convert", "push", "train")
LOADING = frozenset({"run", "predict", "convert", "train"})  # they do not look at what only the Hub reads
SECONDS = 30
TRAP = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit('foreign code ran')\n"
SETTINGS = ("config", "generation_config", "processor_config", "tokenizer_config", "tokenizer")
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"


@dataclass(frozen=True)
class Way:
    """What it does to a folder, what an error must name, and the commands that it may leave without one."""

    damage: Damage
    names: str
    harmless: frozenset[str] = frozenset()


def write(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def edit(name: str, *path: Any, to: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        place = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        (folder / name).write_text(json.dumps(content))

    return damage


def cut(name: str, share: float) -> Damage:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def replace(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def link_out(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes((TINY / path.name).read_bytes())
    path.symlink_to(secret)


def link_out_templates(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.jinja").write_text("mine")
    (folder / "additional_chat_templates").symlink_to(outside)


def link_to_a_private_file(folder: Path) -> None:
    (folder / "id_rsa").write_text("mine")
    (folder / "LICENSE-x").symlink_to("id_rsa")


def traps(folder: Path) -> None:
    """A module that would end the process, named for every class."""
    (folder / "trap.py").write_text(TRAP)
    names = ("Config", "Model", "ModelForImageTextToText", "ModelForMultimodalLM", "Processor", "VideoProcessor")
    for name in ("config", "processor_config", "tokenizer_config"):
        auto_map = {f"Auto{one}": "trap.Trap" for one in names} | {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}
        edit(f"{name}.json", "auto_map", to=auto_map)(folder)
    for part in ("image_processor", "video_processor"):
        edit("processor_config.json", part, "auto_map", to={"AutoVideoProcessor": "trap.Trap"})(folder)


def custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(TRAP)


def index(weight_map: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return damage


def many_names(folder: Path) -> None:
    """More empty tensors than any model has."""
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = raw[8 : 8 + size].decode().rstrip()[:-1] + "".join(f',"x{i}":{empty}' for i in range(100_000)) + "}"
    header += " " * (-len(header) % 8)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + size :])


def drop(part: str) -> Damage:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if part in name]:
            del weights[name]

    return edit_weights(change)


def deep(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


CONTENTS: dict[str, str | bytes] = {
    "list": "[]",
    "deep": deep(100_000),
    "deep for copies": deep(700),
    "empty": "",
    "no text": b"\xff\xfe{}",
}
WAYS: dict[str, Way] = {
    f"{name} {kind}": Way(write(f"{name}.json", content), f"{name}.json")
    for name in SETTINGS
    for kind, content in CONTENTS.items()
}
WAYS |= {f"{name} cut": Way(cut(f"{name}.json", 0.6), f"{name}.json") for name in SETTINGS}
WAYS |= {
    f"{file} {'.'.join(path)} {value!r}": Way(edit(f"{file}.json", *path, to=value), named or path[-1])
    for file, path, value, named in [
        ("config", ("vision_config",), 3, ""),
        ("config", ("text_config",), [1], ""),
        ("config", ("text_config", "num_attention_heads"), 0, ""),
        ("config", ("vision_config", "num_hidden_layers"), 10**8, ""),
        ("config", ("vision_config", "patch_size"), 0, ""),
        ("config", ("text_config", "hidden_size"), "wide", ""),
        ("config", ("text_config", "hidden_act"), "nope", "config.json"),
        ("config", ("text_config", "vocab_size"), 10**15, ""),
        ("config", ("text_config", "rope_parameters"), 3, "config.json"),
        ("config", ("vision_config", "pruning_ratio"), "much", ""),
        ("config", ("vision_config", "image_size"), 3, "config.json"),
        ("config", ("adapter_config",), "x", ""),
        ("config", ("adapter_config", "vision_feature_layer"), [], ""),
        ("config", ("model_type",), ["stts"], "model"),
        ("processor_config", ("video_processor",), 3, ""),
        ("processor_config", ("image_processor",), [1], ""),
        ("processor_config", ("video_processor", "size"), "big", "size"),
        ("config", ("image_patch_id",), 5, ""),
        ("processor_config", ("video_processor", "image_mean"), "x", "processor"),
        ("processor_config", ("video_processor", "patch_size"), -1, "processor"),
        ("tokenizer_config", ("eos_token",), ["a"], ""),
        ("tokenizer", ("added_tokens",), None, "tokenizer"),
        ("tokenizer", ("model", "vocab"), {}, "tokenizer"),
        ("generation_config", ("eos_token_id",), "x", ""),
        ("generation_config", ("pad_token_id",), {"a": 1}, ""),
        ("generation_config", ("num_beams",), "many", ""),
        ("generation_config", ("num_return_sequences",), 3, ""),
        ("generation_config", ("cache_implementation",), "nope", ""),
        ("generation_config", ("bad_words_ids",), 3, ""),
        ("generation_config", ("watermarking_config",), "x", ""),
        ("generation_config", ("pruning_ratio",), "x", ""),
        ("generation_config", ("max_new_tokens",), 0, ""),
        ("generation_config", ("exponential_decay_length_penalty",), [], ""),
        ("generation_config", ("prefill_chunk_size",), "x", ""),
        ("generation_config", ("repetition_penalty",), -1, ""),
        ("generation_config", ("is_assistant",), True, ""),
        ("generation_config", ("penalty_alpha",), 0.6, "contrastive_search"),
    ]
}
WAYS |= {
    f"weights {kind}": Way(damage, named, frozenset(harmless))
    for kind, damage, named, harmless in [
        ("cut", cut(WEIGHTS, 0.7), WEIGHTS, ()),
        ("empty", write(WEIGHTS, b""), WEIGHTS, ()),
        ("garbage", write(WEIGHTS, b"\x10" + bytes(7) + b"not a header...."), WEIGHTS, ()),
        ("gone", replace(WEIGHTS, lambda path: None), "safetensors", ()),
        ("without tensors", edit_weights(dict.clear), "", ()),
        ("without the head", drop("lm_head"), "lm_head", ()),
        ("without a norm", drop("ln_f"), "", ()),
        ("without the scorer", drop(".scorer."), "scorer", {"convert", "train"}),
        (
            "of another shape",
            edit_weights(lambda all_of: all_of.update({"lm_head.weight": torch.zeros(3, 4)})),
            "lm_head.weight",
            (),
        ),
        (
            "of a wrong dtype",
            edit_weights(lambda all_of: all_of.update({"lm_head.weight": all_of["lm_head.weight"].to(torch.int8)})),
            "lm_head.weight",
            (),
        ),
        ("in an index out of the folder", index({"a": "../secret.safetensors"}), "secret", ()),
        ("of too many names", many_names, "bytes of names of tensors", ()),
        (
            "in an index of too many names",
            index({f"x{i}": "model-1.safetensors" for i in range(150_000)}),
            "bytes of names of tensors",
            (),
        ),
        ("in an index that is none", index(["a"]), "index", ()),
        ("in an index of missing shards", index({"a": "model-2.safetensors"}), "model-2", ()),
    ]
}
WAYS |= {
    f"added tokens {content}": Way(write("added_tokens.json", content), "added_tokens.json")
    for content in ("[]", '{"a": "b"}')
}
FILES = ("config.json", "tokenizer.json", TEMPLATE, WEIGHTS)
WAYS |= {f"{name} linked out": Way(replace(name, link_out), name) for name in FILES}
WAYS |= {
    "templates linked out": Way(link_out_templates, "secret.jinja"),
    "a link to a private file": Way(link_to_a_private_file, "LICENSE-x"),
}
WAYS |= {f"{name} linked nowhere": Way(replace(name, lambda path: path.symlink_to("gone")), name) for name in FILES}
WAYS |= {
    f"{name} linked to a device": Way(replace(name, lambda path: path.symlink_to("/dev/zero")), name) for name in FILES
}
WAYS |= {f"{name} as a pipe": Way(replace(name, os.mkfifo), name) for name in FILES}
TEMPLATES: dict[str, str | bytes] = {
    "cut": "{% for",
    "that raises": "{{ raise_exception('no') }}",
    "that reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "of no text": b"\xff\xfe",
    "without videos": "{{ messages[0].role }}",
}
WAYS |= {f"template {kind}": Way(write(TEMPLATE, text), "template") for kind, text in TEMPLATES.items()}
WAYS |= {
    "classes that would run something": Way(traps, "auto_map", LOADING),
    "a generate that would run something": Way(custom_generate, "", frozenset(COMMANDS)),
    "a tokenizer class that is not there": Way(
        edit("tokenizer_config.json", "tokenizer_class", to="Evil"), "", frozenset(COMMANDS)
    ),
    "a processor class that is a list": Way(
        edit("processor_config.json", "processor_class", to=[]),
        "`processor_class`",
        frozenset(COMMANDS) - {"convert"},
    ),
    "a model that encodes": Way(
        edit("config.json", "is_encoder_decoder", to=True), "is_encoder_decoder", frozenset({"convert", "train"})
    ),
    "a card of no text": Way(write("README.md", b"\xff\xfe"), "README", LOADING),
}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_small_clip(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), clips=1)


def arguments(command: str, folder: Path, clip: Path) -> list[str]:
    home = folder.parent
    of_answers = ["--checkpoint", str(folder), "--max-new-tokens", "2", "--pruning-ratio", "0.5", "--output"]
    return {
        "run": ["run", str(clip), "What moves?", *of_answers, str(home / "sheet.png")],
        "predict": ["predict", str(clip), "--prompt", "What?", "--workers", "0", *of_answers, str(home / "a.jsonl")],
        "doctor": ["doctor", str(folder)],
        "convert": ["convert", str(folder), str(home / "converted")],
        "push": ["push", str(folder), "user/name", "--dry-run"],
        "train": ["train", str(home / "run.yaml")],
    }[command]


def pairs() -> list[Any]:
    """All pairs, but for training that would run. Each way has two commands in turn, one of every other way is fast."""
    turns = [[pytest.mark.slow], [pytest.mark.spare], [pytest.mark.spare]]
    return [
        pytest.param(
            way, command, id=f"{command}-{way}", marks=turns[(place - number) % 3] if place != number % 12 else []
        )
        for number, way in enumerate(WAYS)
        for place, command in enumerate(COMMANDS)
        if not (command == "train" and command in WAYS[way].harmless)
    ]


@pytest.mark.skipif(os.name != "posix", reason="pipes and alarms are POSIX's")
@pytest.mark.parametrize(("name", "command"), pairs())
def test_a_broken_folder_is_one_sentence(name, command, clip, data, tmp_path, capsys, monkeypatch):
    way, folder = WAYS[name], tmp_path / "checkpoint"
    shutil.copytree(TINY, folder)
    way.damage(folder)
    write_config(tmp_path, data, tmp_path / "trained", model=folder)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked a question"))

    def give_up(*_: object) -> None:
        raise AssertionError(f"hung for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        status = main(arguments(command, folder, clip))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = capsys.readouterr()
    assert not list(tmp_path.rglob("ran")), "foreign code ran"
    assert "Traceback" not in said.out + said.err
    if command in way.harmless:
        assert status == 0, said.err
        return
    assert status == (1 if command == "doctor" else 2), said.out + said.err
    [problem] = [said.out] if command == "doctor" else [line for line in said.err.splitlines() if ": error: " in line]
    assert way.names in problem
    assert not (tmp_path / "a.jsonl").exists() or not (tmp_path / "a.jsonl").read_text().count("\n")
    assert not (tmp_path / "sheet.png").exists()
    assert not (tmp_path / "converted").exists()
    assert not list(tmp_path.glob("trained/*.safetensors"))


@pytest.mark.slow
def test_so_it_is_in_a_process_that_could_be_asked(clip, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    traps(folder)
    line = [sys.executable, "-m", "stts_hf.cli.main", *arguments("run", folder, clip)]
    done = subprocess.run(line, input="y\ny\ny\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("ran"))
