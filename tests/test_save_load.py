"""Saving: the folder is complete, a second save changes nothing, and nothing that goes wrong leaves one that lies."""

import json
import os
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.quantizers import HfQuantizer

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from stts_hf.modeling.saving_stts import stale_weights
from tests.checkpoints import (
    AUTO_CLASSES,
    TINY,
    digests,
    load_tiny,
    logits_of,
    prepare,
    weights_of,
    write_small_clip,
)

CONFIGS = ("config.json", "generation_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.json")


def read_json(file: Path) -> dict:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The tiny checkpoint, loaded through the package and saved."""
    folder = tmp_path_factory.mktemp("saved")
    load_tiny().save_pretrained(folder)
    STTSProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(write_small_clip(tmp_path_factory.mktemp("clip")))


def test_folder_holds_all_that_a_checkpoint_needs(saved):
    code = {file.name for file in TINY.glob("*.py")}
    wanted = {*CONFIGS, "README.md", "model.safetensors", "tokenizer_config.json"} | code
    assert {file.name for file in saved.iterdir()} == wanted


@pytest.mark.parametrize("part", ["model", "processor"])
def test_either_part_saves_all_the_code(tmp_path, part):
    (load_tiny() if part == "model" else STTSProcessor.from_pretrained(TINY)).save_pretrained(tmp_path)
    assert digests(tmp_path, "*.py") == digests(TINY, "*.py")


def test_auto_map_names_every_class(saved):
    processor = read_json(saved / "processor_config.json")
    assert read_json(saved / "config.json")["auto_map"] == AUTO_CLASSES
    assert processor["auto_map"]["AutoProcessor"] == AUTO_CLASSES["AutoProcessor"]
    assert processor["video_processor"]["auto_map"]["AutoVideoProcessor"] == AUTO_CLASSES["AutoVideoProcessor"]


def test_code_is_real_files_and_byte_for_byte_ours(saved):
    assert not any(file.is_symlink() for file in saved.iterdir())
    assert digests(saved, "*.py") == digests(TINY, "*.py")


def test_weights_are_those_loaded(saved):
    before, after = weights_of(TINY), weights_of(saved)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_saving_again_changes_no_byte(saved, tmp_path):
    load_tiny(saved).save_pretrained(tmp_path)
    STTSProcessor.from_pretrained(saved).save_pretrained(tmp_path)
    assert digests(tmp_path, "*") == digests(saved, "*")


def test_a_model_that_was_never_loaded_is_saved_as_after_a_load(tmp_path):
    model = STTSForConditionalGeneration(STTSConfig.from_pretrained(TINY)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "new")
    STTSForConditionalGeneration.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "again")
    assert digests(tmp_path / "again", "*.json", "*.safetensors") == digests(
        tmp_path / "new", "*.json", "*.safetensors"
    )


def test_stts_tiny_is_what_saving_writes(saved):
    # In the card the preset has words of its own.
    names = {*CONFIGS, "tokenizer_config.json", "model.safetensors"}
    before, after = digests(TINY, "*"), digests(saved, "*")
    assert {name for name in names if before[name] != after[name]} == set()


def test_a_quantised_model_is_saved_under_native_names(tmp_path):
    # Released names would join packed weights: 4-bit ones then load no more, 8-bit ones are not even saved.
    class Quantizer(HfQuantizer):
        quantization_config: Any = None

        def __init__(self):
            pass

        def is_serializable(self):
            return True

        is_trainable = True

    model = load_tiny()
    names = set(model.state_dict())
    model.hf_quantizer = Quantizer()
    model.save_pretrained(tmp_path)
    assert weights_of(tmp_path).keys() == names


@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_a_model_quantised_by_bitsandbytes_loads_as_it_was_saved(tmp_path, option):
    pytest.importorskip("bitsandbytes")
    model = load_tiny(quantization_config=BitsAndBytesConfig(**{option: True}), device_map="cpu")
    model.save_pretrained(tmp_path)
    prompt = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_tiny(tmp_path)(input_ids=prompt).logits, model(input_ids=prompt).logits)


SAVE_AGAIN = """
from transformers import AutoModelForImageTextToText, AutoProcessor
source, destination = sys.argv[1:]
AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=True).save_pretrained(destination)
AutoProcessor.from_pretrained(source, trust_remote_code=True).save_pretrained(destination)
"""


def test_saving_again_from_remote_code_changes_no_byte(saved, tmp_path, run_without_package):
    again = tmp_path / "again"
    run_without_package(SAVE_AGAIN, str(saved), str(again))
    assert digests(again, "*") == digests(saved, "*")


def test_sharded_weights_load_equal(tmp_path, inputs):
    model = load_tiny()
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(load_tiny(tmp_path), inputs), logits_of(model, inputs))


@pytest.mark.parametrize("first", ["50GB", "1MB", "2MB"])
@pytest.mark.parametrize("second", ["50GB", "1MB"])
def test_a_save_over_another_leaves_only_the_new_weights(tmp_path, first, second):
    model = load_tiny()
    model.save_pretrained(tmp_path, max_shard_size=first)
    torch.nn.init.constant_(model.lm_head.weight, 3.0)
    model.save_pretrained(tmp_path, max_shard_size=second)
    assert torch.equal(load_tiny(tmp_path).lm_head.weight, model.lm_head.weight)
    assert sum(tensor.numel() for tensor in weights_of(tmp_path).values()) == model.num_parameters()


def test_stale_weights_are_those_of_the_variant_saved():
    saved = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    present = [
        *saved,
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "model.fp16.safetensors",
        "adapter_model.safetensors",
    ]
    assert stale_weights(present, saved) == ["model-00003-of-00003.safetensors", "model.safetensors"]
    assert stale_weights(present, ["model.fp16-00001-of-00001.safetensors"]) == ["model.fp16.safetensors"]
    assert stale_weights(present, ["config.json"]) == []


def test_a_card_is_written_once(saved, tmp_path):
    card: Any = ModelCard.load(saved / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "video-text-to-text")
    (tmp_path / "README.md").write_text("mine")
    load_tiny().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_processor_saved_to_a_model_without_card_writes_one(tmp_path):
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    STTSProcessor.from_pretrained(TINY).save_pretrained(tmp_path)
    assert "| `pruning_layer` | 3 " in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"model_type": "llama"}', '{"model_type": "stts"}'])
def test_a_processor_saved_elsewhere_writes_no_card(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    STTSProcessor.from_pretrained(TINY).save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("shards", ["50GB", "1MB", "100KB"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_an_offloaded_model_saves_weights_that_load_equal(tmp_path, inputs, place, shards):
    pytest.importorskip("accelerate")
    device_map = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "lm_head": "cpu"}
    device_map["model.language_model"] = place
    model = load_tiny(device_map=device_map, offload_folder=tmp_path / "offload")
    model.save_pretrained(tmp_path / "saved", max_shard_size=shards)
    wanted, found = load_tiny().state_dict(), load_tiny(tmp_path / "saved").state_dict()
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def test_how_a_tokenizer_was_loaded_is_not_saved(tmp_path):
    STTSProcessor.from_pretrained(TINY, local_files_only=True).save_pretrained(tmp_path)
    assert read_json(tmp_path / "tokenizer_config.json") == read_json(TINY / "tokenizer_config.json")


def test_card_warns_of_an_untrained_scorer(tmp_path):
    model = load_tiny()
    torch.nn.init.zeros_(model.model.vision_tower.scorer.score_layer.weight)
    model.save_pretrained(tmp_path)
    assert "untrained" in (tmp_path / "README.md").read_text()


def test_processor_returns_the_files_it_wrote(tmp_path):
    files = STTSProcessor.from_pretrained(TINY).save_pretrained(tmp_path)
    assert [Path(file) for file in files] == [tmp_path / "processor_config.json"]
    assert all(Path(file).is_file() for file in files)


class OneSample(torch.utils.data.Dataset):
    def __init__(self, inputs):
        labels = inputs["input_ids"].where(inputs["mm_token_type_ids"] == 0, -100)
        self.sample = {**inputs, "labels": labels.where(labels < 1024, -100)}

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.sample


@pytest.mark.parametrize("place", ["end", "checkpoint"])
def test_trainer_saves_a_whole_folder(tmp_path, inputs, place):
    trainer: Any = Trainer(
        load_tiny(),
        TrainingArguments(
            str(tmp_path / "run"), max_steps=1, save_steps=1, report_to="none", per_device_train_batch_size=1,
            use_cpu=True, remove_unused_columns=False, disable_tqdm=True, logging_strategy="no",
        ),
        train_dataset=OneSample(inputs),
        data_collator=lambda samples: samples[0],
        processing_class=STTSProcessor.from_pretrained(TINY),
    )  # fmt: skip
    trainer.train()
    if place == "end":
        trainer.save_model()
    folder = tmp_path / "run" / ("" if place == "end" else "checkpoint-1")
    assert {*CONFIGS, "README.md", "model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert digests(folder, "*.py") == digests(TINY, "*.py")
    trained = trainer.model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in load_tiny(folder).state_dict().items())
    assert not torch.equal(trained["lm_head.weight"], load_tiny().lm_head.weight)


def test_an_interrupt_while_files_move_keeps_what_was_saved(tmp_path, monkeypatch):
    model, moved = load_tiny(), []
    model.save_pretrained(tmp_path)
    replace = os.replace

    def interrupt(source, destination):
        moved.append(destination)
        if len(moved) == 5:
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    monkeypatch.undo()
    [stage] = tmp_path.glob("_saving*")
    with pytest.raises(OSError, match=r"config\.json"):
        load_tiny(tmp_path)
    rest = tmp_path.parent / "rest"
    shutil.copytree(tmp_path, rest)
    for file in sorted(
        (rest / stage.name).iterdir(), key=lambda file: file.name == "config.json"
    ):  # as the doctor says
        file.rename(rest / file.name)
    assert torch.equal(load_tiny(rest).lm_head.weight, model.lm_head.weight)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("_saving*"))


@pytest.mark.parametrize("name", ["generation_config.json", "modeling_stts.py"])
def test_a_folder_in_the_way_of_a_file_is_refused_before_anything_moves(saved, tmp_path, name):
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    before = digests(folder, "config.json", "*.safetensors", "scoring*")
    with pytest.raises(FileExistsError, match=f"{name} is in the way"):
        load_tiny().save_pretrained(folder)
    assert digests(folder, "config.json", "*.safetensors", "scoring*") == before
    assert not list(folder.glob("_saving*"))


@pytest.mark.parametrize("existed", [False, True])
def test_a_failed_first_save_makes_no_folder(tmp_path, existed):
    folder = tmp_path / "folder"
    if existed:
        folder.mkdir()
    with pytest.raises(ValueError, match="banana"):
        load_tiny().save_pretrained(folder, max_shard_size="banana")
    assert [entry.name for entry in tmp_path.rglob("*")] == (["folder"] if existed else [])


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
@pytest.mark.parametrize("part", ["model", "processor"])
def test_a_full_disk_leaves_the_folder_as_it_was(saved, tmp_path, part):
    folder = tmp_path / "folder"
    saver = load_tiny() if part == "model" else STTSProcessor.from_pretrained(TINY)
    for file in saved.iterdir():
        (folder / file.name).parent.mkdir(exist_ok=True)
        (folder / file.name).write_bytes(file.read_bytes())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # bytes: less than weights or tokenizer
    try:
        with pytest.raises(Exception, match=re.compile("too large|file size", re.IGNORECASE)):
            saver.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert digests(folder, "*") == digests(saved, "*")
    assert {entry.name for entry in folder.iterdir()} == {entry.name for entry in saved.iterdir()}
