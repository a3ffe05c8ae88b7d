"""`stts-hf doctor`: a sound folder passes, and every kind of damage is found, named and given a remedy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stts_hf.checkpoints.convert import convert_checkpoint
from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.files import Finding
from stts_hf.cli.main import main
from tests.stts_hf.checkpoints.convert_files import CODE_THAT_MUST_NOT_RUN, copy, write_base, write_molmo2

Damage = Callable[[Path], object]
PATCH_TABLE = "model.vision_tower.positional_embedding"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    write_molmo2(folder / "source", "native")
    return convert_checkpoint(folder / "source", folder / "sound", max_shard_size="100KB").folder


def edit(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def shard_with(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def edit_weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(folder: Path) -> None:
        path = shard_with(folder, name)
        weights = load_file(path)
        weights[name] = change(weights[name])
        save_file(weights, path, metadata={"format": "pt"})

    return damage


def truncate(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def rename_weight(old: str, new: str) -> Damage:
    def damage(folder: Path) -> None:
        path = shard_with(folder, old)
        weights = load_file(path)
        weights[new] = weights.pop(old)
        save_file(weights, path, metadata={"format": "pt"})
        edit("model.safetensors.index.json", lambda index: index["weight_map"].update({new: path.name}))(folder)
        edit("model.safetensors.index.json", lambda index: index["weight_map"].pop(old))(folder)

    return damage


def swap_tokenizer(folder: Path) -> None:
    write_base(folder.parent / "base", side=18, vocab_size=300)
    shutil.copy(folder.parent / "base" / "tokenizer.json", folder)


FATAL: list[tuple[str, Damage, str]] = [
    ("configuration", remove("config.json"), "missing"),
    ("configuration", edit("config.json", lambda config: config.update(model_type="molmo2")), "'molmo2' model"),
    ("configuration", edit("config.json", lambda config: config["vision_config"].update(pruning_ratio=2)), "ratio"),
    ("code", edit("config.json", lambda config: config["auto_map"].pop("AutoModel")), "None for AutoModel"),
    ("code", remove("layout_stts.py"), "layout_stts.py is missing"),
    ("code", lambda folder: dangle(folder / "scoring_stts.py"), "lead nowhere (scoring_stts.py)"),
    (
        "code",
        edit("tokenizer_config.json", lambda settings: settings.update(auto_map={"AutoTokenizer": ["tok.Tok", None]})),
        "has ['tok.Tok', None] for AutoTokenizer",
    ),
    (
        "code",
        edit("config.json", lambda config: config["auto_map"].update(AutoConfig="user/name--configuration.Config")),
        "has 'user/name--configuration.Config' for AutoConfig",
    ),
    ("weights", lambda folder: shard_with(folder, "lm_head.weight").unlink(), "is missing"),
    ("weights", lambda folder: os.truncate(shard_with(folder, "lm_head.weight"), 5000), "cut off"),
    ("weights", remove("model.safetensors.index.json"), "neither"),
    ("weights", edit_weight(PATCH_TABLE, lambda table: table[1:].contiguous()), r"[80, 32] instead of [81, 32]"),
    ("weights", rename_weight(PATCH_TABLE, "positions"), "unexpected: positions"),
    ("weights", edit("config.json", lambda config: config["text_config"].update(vocab_size=500)), "lm_head"),
    ("weights", edit_weight("lm_head.weight", lambda weight: weight.to(torch.int8)), "I8"),
    ("tokenizer", remove("tokenizer.json"), "tokenizer.json is missing"),
    ("tokenizer", write("tokenizer.json", "{}"), "tokenizer or processor"),
    ("tokenizer", swap_tokenizer, "<im_patch> is 302 in the tokenizer but 514"),
    ("tokenizer", edit("config.json", lambda config: config.update(image_patch_id=600)), "`image_patch_id`"),
    (
        "tokenizer",
        edit("tokenizer_config.json", lambda settings: [settings.pop(name) for name in ("bos_token", "eos_token")]),
        "neither bos_token nor eos_token",
    ),
    ("tokenizer", edit("generation_config.json", lambda settings: settings.update(eos_token_id=7)), "eos_token_id"),
    ("tokenizer", remove("processor_config.json"), "processor_config.json is missing"),
    (
        "tokenizer",
        edit("processor_config.json", lambda settings: settings["video_processor"].update(pooling_size=[2, 2])),
        "`pooling_size` of the video_processor is [2, 2]",
    ),
    (
        "tokenizer",
        edit("processor_config.json", lambda settings: settings["video_processor"].update(patch_size=14)),
        "`patch_size` of the video_processor is 14",
    ),
    (
        "tokenizer",
        edit("processor_config.json", lambda settings: settings["image_processor"]["size"].update(width=36)),
        "`size` of the image_processor",
    ),
    (
        "code",
        edit("processor_config.json", lambda settings: settings["video_processor"].pop("auto_map")),
        "AutoVideoProcessor",
    ),
    (
        "tokenizer",
        edit("tokenizer_config.json", lambda settings: settings.update(eos_token="<|gone|>")),
        "tokenizer.json lacks (<|gone|>)",
    ),
    ("weights", write("adapter_config.json", "{}"), "adapter_config.json"),
    ("tokenizer", remove("chat_template.jinja"), "missing"),
    ("tokenizer", write("chat_template.jinja", "{% for %}"), "chat template"),
]
WARNINGS: list[tuple[str, Damage, str]] = [
    ("code", lambda folder: append(folder / "scoring_stts.py", "# changed\n"), "scoring_stts.py"),
    ("weights", write("model-00001-of-00002.safetensors", ""), "model-00001-of-00002.safetensors is not read"),
    ("tokenizer", edit("generation_config.json", lambda settings: settings.pop("eos_token_id")), "maximum length"),
    ("configuration", remove("README.md"), "missing"),
    ("configuration", write("README.md", "# A model\n"), "no metadata"),
]


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.py")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def listed(folder: Path) -> list[tuple[str, Finding]]:
    return [(check, finding) for check, found in examine(folder).items() for finding in found]


def test_a_sound_folder_passes_every_check(sound):
    findings = examine(sound)
    assert list(findings) == ["configuration", "code", "weights", "tokenizer"]
    assert listed(sound) == []


@pytest.mark.parametrize(("check", "damage", "message"), FATAL, ids=[f"{row[0]}-{row[2]}" for row in FATAL])
def test_what_makes_a_folder_useless_is_found(sound, tmp_path, check, damage, message):
    folder = copy(sound, tmp_path / "checkpoint")
    damage(folder)
    found = [finding for name, finding in listed(folder) if name == check and message in finding.what]
    assert found, listed(folder)
    assert all(finding.fatal and finding.remedy for finding in found)


@pytest.mark.parametrize(("check", "damage", "message"), WARNINGS, ids=[f"{row[0]}-{row[2]}" for row in WARNINGS])
def test_what_only_deserves_a_look_is_a_warning(sound, tmp_path, check, damage, message):
    folder = copy(sound, tmp_path / "checkpoint")
    damage(folder)
    [(name, finding)] = listed(folder)
    assert name == check
    assert message in finding.what
    assert not finding.fatal


def test_a_checkpoint_without_scorer_is_sent_to_convert(sound, tmp_path):
    folder = copy(sound, tmp_path / "checkpoint")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    weights = load_file(sound.parent / "source" / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    [(_, finding)] = listed(folder)
    assert "scorer" in finding.what
    assert "stts-hf convert" in finding.remedy


def test_no_code_of_the_folder_runs(sound, tmp_path):
    folder = copy(sound, tmp_path / "checkpoint")
    for path in folder.glob("*.py"):
        append(path, CODE_THAT_MUST_NOT_RUN)
    assert [name for name, _ in listed(folder)] == ["code"]


def quantise(folder: Path) -> None:
    """As a quantiser saves: one weight packed, with a scale beside it, and a note in config.json."""
    path = shard_with(folder, "lm_head.weight")
    weights = load_file(path)
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.uint8).reshape(-1, 1)
    weights["lm_head.weight.absmax"] = torch.ones(8)
    save_file(weights, path, metadata={"format": "pt"})
    edit(
        "model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.weight.absmax": path.name})
    )(folder)
    edit("config.json", lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}))(folder)


def test_quantised_weights_deserve_a_look_but_are_not_wrong(sound, tmp_path):
    folder = copy(sound, tmp_path / "checkpoint")
    quantise(folder)
    [(name, finding)] = listed(folder)
    assert (name, finding.fatal) == ("weights", False)
    assert "quantised" in finding.what
    os.truncate(shard_with(folder, "lm_head.weight"), 5000)
    assert any(finding.fatal and "cut off" in finding.what for _, finding in listed(folder))


def test_presets_lack_weights_and_tokenizer_alone(hub_configs):
    wrong = {name for name, finding in listed(hub_configs / "stts-molmo2-4b") if finding.fatal}
    assert wrong == {"weights", "tokenizer"}


def test_stts_tiny_is_sound(hub_configs):
    assert listed(hub_configs / "stts-tiny") == []


def test_exit_status_tells_sound_from_wrong(sound, tmp_path, capsys):
    folder = copy(sound, tmp_path / "checkpoint")
    assert main(["doctor", str(folder)]) == 0
    (folder / "README.md").unlink()
    assert main(["doctor", str(folder)]) == 0
    assert main(["doctor", str(folder), "--strict"]) == 1
    (folder / "chat_template.jinja").unlink()
    assert main(["doctor", str(folder)]) == 1
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    output = capsys.readouterr()
    assert "-> " in output.out
    assert "not a folder" in output.err


@pytest.mark.slow
def test_nothing_but_the_findings_is_said(hub_configs):
    command = [sys.executable, "-m", "stts_hf.cli.main", "doctor", str(hub_configs / "stts-tiny")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_links_out_of_the_folder_are_found(sound, tmp_path):
    folder = copy(sound, tmp_path / "checkpoint")
    (tmp_path / "key").write_text("secret")
    (folder / "LICENSE").symlink_to(tmp_path / "key")
    (folder / "NOTICE").symlink_to("config.json")
    (folder / "notes").symlink_to(tmp_path)  # no part of the checkpoint
    found = [finding for name, finding in listed(folder) if name == "code" and finding.fatal]
    assert [finding.what.split(" is a link ")[0] for finding in found] == ["LICENSE"]


def test_links_of_a_hub_cache_into_its_own_files_are_sound(sound, tmp_path):
    snapshot, blobs = tmp_path / "models--user--tiny" / "snapshots" / "abc", tmp_path / "models--user--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sound.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert listed(snapshot) == []
    (snapshot / "LICENSE").symlink_to(sound / "config.json")
    assert [finding.what.split(" is a link ")[0] for _, finding in listed(snapshot)] == ["LICENSE"]


def test_a_preset_copied_with_its_links_alone_is_sent_to_cp_with_links_followed(hub_configs, tmp_path):
    shutil.copytree(hub_configs / "stts-tiny", tmp_path / "checkpoint", symlinks=True)
    [finding] = [finding for name, finding in listed(tmp_path / "checkpoint") if name == "code"]
    assert "links lead nowhere (attention_stts.py" in finding.what
    assert "cp -rL" in finding.remedy
