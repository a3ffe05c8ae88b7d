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
PATCH_TABLE = "model.vision_backbone.image_vit.positional_embedding"


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
    ("configuration", truncate("config.json", 40), "not valid JSON"),
    ("configuration", edit("config.json", lambda config: config.update(model_type="molmo2")), "'molmo2' model"),
    ("configuration", edit("config.json", lambda config: config["vision_config"].update(pruning_ratio=2)), "ratio"),
    ("code", edit("config.json", lambda config: config["auto_map"].pop("AutoModel")), "None for AutoModel"),
    ("code", remove("layout_stts.py"), "layout_stts.py is missing, and processing_stts.py needs it"),
    ("code", lambda folder: dangle(folder / "scoring_stts.py"), "lead nowhere (scoring_stts.py)"),
    ("code", write("modeling_stts.py", "def broken("), "not valid Python"),
    ("code", write("processing_stts.py", "class Other: pass\n"), "no class STTSProcessor"),
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
    ("tokenizer", remove("tokenizer.json"), "has no tokenizer.json"),
    ("tokenizer", write("tokenizer.json", "{}"), "cannot be used"),
    ("tokenizer", swap_tokenizer, "<im_patch> is 302 in the tokenizer but 514"),
    ("tokenizer", edit("config.json", lambda config: config.update(image_patch_id=600)), "`image_patch_id`"),
    (
        "tokenizer",
        edit("tokenizer_config.json", lambda settings: [settings.pop(name) for name in ("bos_token", "eos_token")]),
        "neither bos_token nor eos_token",
    ),
    ("tokenizer", edit("generation_config.json", lambda settings: settings.update(eos_token_id=7)), "eos_token_id"),
    ("tokenizer", remove("processor_config.json"), "has no processor_config.json"),
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
    ("tokenizer", remove("chat_template.jinja"), "missing"),
    ("tokenizer", write("chat_template.jinja", "{% for %}"), "chat template"),
]
WARNINGS: list[tuple[str, Damage, str]] = [
    ("code", lambda folder: append(folder / "scoring_stts.py", "# changed\n"), "scoring_stts.py"),
    ("weights", write("model-00001-of-00002.safetensors", ""), "model-00001-of-00002.safetensors is not read"),
    ("weights", write("pytorch_model.bin", ""), "may hold code"),
    ("weights", edit("config.json", lambda config: config.update(dtype="bfloat16")), "the weights are float32"),
    ("weights", edit_weight("lm_head.weight", lambda weight: weight.bfloat16()), "are bfloat16 and float32"),
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
    assert "-> copy that of the base model" in output.out
    assert "not a folder" in output.err


def drop_token(text: str) -> Damage:
    def change(tokenizer: dict) -> None:
        tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != text]

    return edit("tokenizer.json", change)


def settings_of(name: str, *path: str, value: object) -> Damage:
    def change(settings: dict) -> None:
        for key in path[:-1]:
            settings = settings[key]
        settings[path[-1]] = value

    return edit(name, change)


UNLOADABLE: dict[str, tuple[str, Damage, str]] = {
    "no_video_token": ("tokenizer", drop_token("<|video|>"), "lacks <|video|>"),
    "other_tokenizer_class": (
        "tokenizer",
        settings_of("tokenizer_config.json", "tokenizer_class", value="BertTokenizer"),
        "cannot be loaded as a BertTokenizer",
    ),
    "unknown_eos_token": (
        "tokenizer",
        settings_of("tokenizer_config.json", "eos_token", value="<|gone|>"),
        "differs from tokenizer.json in <|gone|>",
    ),
    "unknown_filter": ("tokenizer", write("chat_template.jinja", "{{ messages | shout }}"), "shout"),
    "adapter": ("weights", write("adapter_config.json", "{}"), "adapter_config.json"),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_only_shows_at_loading_is_found(sound, tmp_path, name):
    folder = copy(sound, tmp_path / "checkpoint")
    check, damage, message = UNLOADABLE[name]
    damage(folder)
    found = [finding for where, finding in listed(folder) if where == check and message in finding.what]
    assert found, listed(folder)
    assert all(finding.fatal and finding.remedy for finding in found)


MALFORMED: dict[str, tuple[str, Damage, str]] = {
    "auto_map_list": ("code", settings_of("config.json", "auto_map", value=["a"]), "`auto_map` in config.json must be"),
    "auto_map_value_int": ("code", settings_of("config.json", "auto_map", "AutoModel", value=3), "has 3 for AutoModel"),
    "vision_config_string": (
        "configuration",
        settings_of("config.json", "vision_config", value="big"),
        "config.json has a setting that cannot be (Validation error for field 'vision_config'",
    ),
    "video_processor_string": (
        "code",
        settings_of("processor_config.json", "video_processor", value="video"),
        "`video_processor` in processor_config.json must be a JSON object, but is 'video'",
    ),
    "processor_auto_map_string": (
        "code",
        settings_of("processor_config.json", "auto_map", value="processing_stts"),
        "`auto_map` in processor_config.json must be a JSON object",
    ),
    "video_auto_map_list": (
        "code",
        settings_of("processor_config.json", "video_processor", "auto_map", value=[1]),
        "`auto_map` in the video_processor of processor_config.json must be a JSON object, but is [1]",
    ),
    "video_processor_nested": (
        "code",
        settings_of("processor_config.json", "video_processor", value=[[1] * 100] * 100),
        "must be a JSON object, but is [[...], [...], [...], [...], [...], [...], ...]",
    ),
    "size_int": (
        "tokenizer",
        settings_of("processor_config.json", "video_processor", "size", value=378),
        "`size` of the video_processor is",
    ),
    "pooling_int": (
        "tokenizer",
        settings_of("processor_config.json", "video_processor", "pooling_size", value=3),
        "`pooling_size` of the video_processor is 3, but the vision config has [3, 3]",
    ),
    "eos_list": (
        "tokenizer",
        settings_of("tokenizer_config.json", "eos_token", value=["<|im_end|>"]),
        "Special token eos_token has to be either str or AddedToken",
    ),
    "tokenizer_auto_map_int": (
        "code",
        settings_of("tokenizer_config.json", "auto_map", value=1),
        "`auto_map` in tokenizer_config.json must be a JSON object, but is 1",
    ),
    "weight_map_list": (
        "weights",
        settings_of("model.safetensors.index.json", "weight_map", value=[]),
        "model.safetensors.index.json is not the index of a checkpoint",
    ),
    "config_list": ("configuration", write("config.json", "[]"), "config.json must hold a JSON object, but is []"),
    "generation_list": (
        "tokenizer",
        write("generation_config.json", "[]"),
        "generation_config.json must hold a JSON object, but is []",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_settings_of_a_wrong_kind_are_findings(sound, tmp_path, name):
    folder = copy(sound, tmp_path / "checkpoint")
    check, damage, message = MALFORMED[name]
    damage(folder)
    found = listed(folder)
    assert any(finding.fatal and where == check and message in finding.what for where, finding in found), found
    assert all(finding.what and finding.remedy for _, finding in found)


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
