"""`stts-hf doctor`: damage that parses, but does not fit. test_broken_folders.py has what does not parse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.files import Finding
from stts_hf.cli.main import main
from tests.checkpoints import TINY
from tests.stts_hf.checkpoints.test_broken_folders import Damage, edit_weights, write


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def edit(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def of_videos(**settings: object) -> Damage:
    return edit("processor_config.json", lambda config: config["video_processor"].update(settings))


FATAL: list[tuple[str, Damage, str]] = [
    ("configuration", remove("config.json"), "missing"),
    ("configuration", edit("config.json", lambda config: config.update(model_type="molmo2")), "'molmo2' model"),
    ("code", edit("config.json", lambda config: config["auto_map"].pop("AutoModel")), "None for AutoModel"),
    ("code", remove("tower_stts.py"), "tower_stts.py is missing"),
    (
        "code",
        edit("config.json", lambda config: config["auto_map"].update(AutoConfig="user/name--configuration.Config")),
        "has 'user/name--configuration.Config' for AutoConfig",
    ),
    (
        "code",
        edit("processor_config.json", lambda settings: settings["video_processor"].pop("auto_map")),
        "AutoVideoProcessor",
    ),
    ("weights", edit_weights(lambda weights: weights.update(router=torch.zeros(2))), "unexpected: router"),
    ("weights", edit("config.json", lambda config: config["text_config"].update(vocab_size=500)), "lm_head"),
    ("weights", write("adapter_config.json", "{}"), "adapter_config.json"),
    ("tokenizer", remove("tokenizer.json"), "tokenizer.json is missing"),
    ("tokenizer", edit("config.json", lambda config: config.update(image_patch_id=7)), "`image_patch_id`"),
    ("tokenizer", edit("generation_config.json", lambda settings: settings.update(eos_token_id=7)), "eos_token_id"),
    ("tokenizer", of_videos(pooling_size=[2, 2]), "`pooling_size` of the video_processor is [2, 2]"),
    (
        "tokenizer",
        edit("tokenizer_config.json", lambda settings: settings.update(eos_token="<|gone|>")),
        "tokenizer.json lacks (<|gone|>)",
    ),
    ("tokenizer", remove("chat_template.jinja"), "missing"),
]
WARNINGS: list[tuple[str, Damage, str]] = [
    ("code", write("scoring_stts.py", "# changed\n"), "scoring_stts.py"),
    ("weights", write("model-00001-of-00002.safetensors", ""), "model-00001-of-00002.safetensors is not read"),
    ("tokenizer", edit("generation_config.json", lambda settings: settings.pop("eos_token_id")), "maximum length"),
    ("configuration", remove("README.md"), "missing"),
    ("configuration", write("README.md", "# A model\n"), "no metadata"),
]


def listed(folder: Path) -> list[tuple[str, Finding]]:
    return [(check, finding) for check, found in examine(folder).items() for finding in found]


@pytest.mark.parametrize(("check", "damage", "message"), FATAL, ids=[f"{row[0]}-{row[2]}" for row in FATAL])
def test_what_makes_a_folder_useless_is_found(folder, check, damage, message):
    damage(folder)
    found = [finding for name, finding in listed(folder) if name == check and message in finding.what]
    assert found, listed(folder)
    assert all(finding.fatal and finding.remedy for finding in found)


@pytest.mark.parametrize(("check", "damage", "message"), WARNINGS, ids=[f"{row[0]}-{row[2]}" for row in WARNINGS])
def test_what_only_deserves_a_look_is_a_warning(folder, check, damage, message):
    damage(folder)
    [(name, finding)] = listed(folder)
    assert (name, finding.fatal) == (check, False)
    assert message in finding.what


def test_quantised_weights_deserve_a_look_but_are_not_wrong(folder):
    packed = {"lm_head.weight": torch.ones(8, 1, dtype=torch.uint8), "lm_head.weight.absmax": torch.ones(8)}
    edit_weights(lambda weights: weights.update(packed))(folder)
    edit("config.json", lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}))(folder)
    [(name, finding)] = listed(folder)
    assert (name, finding.fatal) == ("weights", False)
    assert "quantised" in finding.what


def test_exit_status_tells_sound_from_wrong(folder, tmp_path, capsys):
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


def test_links_of_a_hub_cache_into_its_own_files_are_sound(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--user--tiny" / "snapshots" / "abc", tmp_path / "models--user--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(path for path in sorted(folder.iterdir()) if path.is_file()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert listed(snapshot) == []
    (snapshot / "LICENSE").symlink_to(folder / "config.json")
    assert [finding.what.split(" is a link ")[0] for _, finding in listed(snapshot)] == ["LICENSE"]


def test_a_preset_copied_with_its_links_alone_is_sent_to_cp_with_links_followed(tmp_path):
    shutil.copytree(TINY, tmp_path / "checkpoint", symlinks=True)
    [finding] = [finding for name, finding in listed(tmp_path / "checkpoint") if name == "code"]
    assert "links lead nowhere (attention_stts.py" in finding.what
    assert "cp -rL" in finding.remedy
