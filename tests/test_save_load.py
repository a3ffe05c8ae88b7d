"""Saving by remote code: the folder is complete and loads, and a second save changes nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig
from transformers.quantizers import HfQuantizer

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from tests.checkpoints import (
    TINY,
    digests,
    load_tiny,
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
    wanted = {*CONFIGS, "model.safetensors", "tokenizer_config.json"} | code
    assert {file.name for file in saved.iterdir()} == wanted


@pytest.mark.parametrize("part", ["model", "processor"])
def test_either_part_saves_all_the_code(tmp_path, part):
    (load_tiny() if part == "model" else STTSProcessor.from_pretrained(TINY)).save_pretrained(tmp_path)
    assert digests(tmp_path, "*.py") == digests(TINY, "*.py")
    assert not any(file.is_symlink() for file in tmp_path.iterdir())


def test_settings_of_from_pretrained_are_the_configs_alone(saved, inputs, tmp_path):
    """Else `generate` would go by them when the config is changed afterwards, and so would what is saved then."""
    model = load_tiny(saved, pruning_ratio=0.25, temporal_loss_weight=0.5)
    for name in ("pruning_ratio", "temporal_loss_weight"):
        assert not hasattr(model.generation_config, name)
    model.config.vision_config.pruning_ratio = 0.75
    model.save_pretrained(tmp_path)
    for some in (model, load_tiny(tmp_path)):
        output: Any = some.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
        found = output.keep_mask[0]
        assert torch.equal(found, some(**inputs).keep_mask[0])
        assert found.float().mean() < 0.3


@pytest.mark.parametrize(
    ("there", "given", "left"),
    [
        ({"pruning_ratio": 0.9}, {"pruning_ratio": 0.25}, {}),
        ({"pruning_ratio": 0.9}, {"score_threshold": 0.1}, {}),
        ({"score_threshold": 0.1, "max_pruning_ratio": 0.9}, {"pruning_ratio": 0.25}, {}),
        ({"score_threshold": 0.1, "max_pruning_ratio": 0.9}, {"max_pruning_ratio": 0.5}, {"score_threshold": 0.1}),
        ({"pruning_ratio": 0.9}, {"selector": "cosine"}, {"pruning_ratio": 0.9}),
    ],
    ids=["ratio", "threshold", "ratio for threshold", "bound", "selector"],
)
def test_settings_of_from_pretrained_take_the_place_of_saved_ones_of_generate(saved, tmp_path, there, given, left):
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(read_json(file) | there))
    own = vars(load_tiny(folder, **given).generation_config)
    assert {name: own[name] for name in KEEP_ARGUMENTS if own.get(name) is not None} == left


def test_saving_again_changes_no_byte(saved, tmp_path):
    load_tiny(saved).save_pretrained(tmp_path)
    STTSProcessor.from_pretrained(saved).save_pretrained(tmp_path)
    assert digests(tmp_path, "*") == digests(saved, "*")


def test_a_model_that_was_never_loaded_is_saved_as_after_a_load(tmp_path):
    model = STTSForConditionalGeneration(STTSConfig.from_pretrained(TINY)).bfloat16()
    model.save_pretrained(tmp_path / "new")
    STTSForConditionalGeneration.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "again")
    assert digests(tmp_path / "again", "*.json", "*.safetensors") == digests(
        tmp_path / "new", "*.json", "*.safetensors"
    )


WRITTEN_BY = json.loads((TINY / "config.json").read_text())["transformers_version"]


@pytest.mark.skipif(transformers.__version__ != WRITTEN_BY, reason=f"transformers {WRITTEN_BY} wrote it")
def test_stts_tiny_is_what_saving_writes(saved):
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

    model: Any = load_tiny()
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


@pytest.mark.parametrize(("place", "shards"), [("cpu", "50GB"), ("disk", "100KB")])
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
