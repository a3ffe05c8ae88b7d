"""The card of an adapter's folder: what it says, and that its instructions work where this package is not installed."""

import json
import re

import pytest
from huggingface_hub import ModelCard

from stts_hf import STTSConfig, STTSProcessor
from stts_hf.checkpoints.card import NO_ADAPTER, NO_BASE, write_model_card
from tests.checkpoints import TINY, load_tiny
from tests.stts_hf.training.runs import trainer
from tests.test_peft import TARGETS

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["scorer"])
    peft.get_peft_model(load_tiny(), config).save_pretrained(folder)
    STTSProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_what_is_known_is_said(adapter):
    write_model_card(
        adapter,
        base_model="someone/base",
        repo_id="someone/adapter",
        datasets=["someone/clips"],
        training="Ten steps.",
        figures={"loss": 1.5},
    )
    card = ModelCard.load(adapter / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ("peft", "video-text-to-text", "apache-2.0")
    assert (data.base_model, data.base_model_relation, data.datasets) == ("someone/base", "adapter", ["someone/clips"])
    assert "lora" in data.tags
    assert "custom_code" not in data.tags
    for words in ('"someone/base", "someone/adapter"', "rank 4, alpha 8", "`scorer`", "Ten steps.", "| loss | 1.5 |"):
        assert words in card.text


def test_what_is_not_known_is_not_said(adapter):
    write_model_card(adapter)
    card = ModelCard.load(adapter / "README.md")
    assert card.data.base_model is None
    assert not re.search(r"## (Training|Measured)", card.text)
    assert str(TINY) not in card.text


@pytest.mark.slow
def test_instructions_work(adapter, tmp_path, run_without_package):
    write_model_card(adapter, settings={"vision_config.pruning_ratio": 0.25})
    text = (adapter / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    code = code.replace(NO_BASE, str(TINY)).replace(NO_ADAPTER, str(adapter))
    run_without_package(code)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["vision_config"]["pruning_ratio"] == 0.25
    assert STTSConfig.from_pretrained(tmp_path / "merged").vision_config.pruning_ratio == 0.25
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "merged" / "processor_config.json").is_file()


def test_trainer_writes_it_in_place_of_pefts(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["scorer"])
    run = trainer(tmp_path, model=peft.get_peft_model(load_tiny(), config))
    run.save_model()
    run.create_model_card(model_name="Ours", dataset_tags="someone/clips")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.pipeline_tag, card.data.datasets) == ("video-text-to-text", ["someone/clips"])
    for words in ("# Ours", "PeftModel.from_pretrained(model, adapter)", "### Training hyperparameters"):
        assert words in card.text
