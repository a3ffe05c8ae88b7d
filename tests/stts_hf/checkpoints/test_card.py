"""Cards of checkpoints and adapters: metadata that the Hub accepts, settings as in the config, code that runs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from stts_hf import STTSConfig, STTSProcessor
from stts_hf.checkpoints.card import (
    NO_ADAPTER,
    NO_BASE,
    STOCK_SENTENCE,
    UNNAMED,
    base_model_of,
    checkpoint_card,
    write_model_card,
)
from stts_hf.checkpoints.families import OWN
from tests.checkpoints import TINY, load_tiny, write_small_clip
from tests.test_peft import TARGETS


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("config.json", "processor_config.json"):
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


def written(folder: Path, **details: Any) -> Any:
    write_model_card(folder, **details)
    return ModelCard.load(folder / "README.md", ignore_metadata_errors=False)


def test_metadata_is_what_the_hub_reads(folder):
    data = written(folder, base_model="allenai/Molmo2-4B", datasets=["user/videos"], tags=["tiny"]).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "video-text-to-text"
    assert data.license == "apache-2.0"
    assert data.base_model == "allenai/Molmo2-4B"
    assert data.datasets == ["user/videos"]
    assert data.tags == [*OWN["stts"].tags, "tiny"]


def test_settings_are_read_from_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {
        "pruning_ratio": 0.3,
        "pruning_layer": 5,
        "packing": "first_fit_descending",
        "refill_single_frame_bins": True,
        "selector": "cosine",
    }
    config["pruned_position_ids"] = "compact"
    (folder / "config.json").write_text(json.dumps(config))
    text = written(folder).text
    for row in (
        "| `pruning_ratio` | 0.3, ",
        "| `pruning_layer` | 5 (zero-based: layers 0 to 5 see every patch)",
        "| `selector` | `cosine` |",
        "| `packing` | `first_fit_descending` with refill |",
        "| `pruned_position_ids` | `compact` |",
        "| frames | 4 per second, at most 16 |",
    ):
        assert row in text


def test_training_figures_and_warning_appear_where_given(folder):
    text = written(folder, training="6,250 steps.", figures={"MVBench": 70.1}, scorer_trained=False).text
    assert "## Training\n\n6,250 steps.\n" in text
    assert "| MVBench | 70.1 |" in text
    assert "scorer of this checkpoint is untrained" in text


@pytest.mark.slow
def test_usage_runs_as_it_is_printed(folder, tmp_path, run_without_package):
    write_small_clip(tmp_path)  # `clip.mp4`, as in the card
    text = written(folder, repo_id=str(TINY)).text
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code) == 1
    run_without_package(code[0])


def test_a_card_to_push_names_the_repository_and_keeps_the_authors_words(folder):
    write_model_card(folder, license="mit", tags=["mine"])
    file = folder / "README.md"
    file.write_text(file.read_text() + "\nMy words.\n")
    card: Any = checkpoint_card(folder, repo_id="user/name")
    assert 'checkpoint = "user/name"' in card.text
    assert UNNAMED not in card.text
    assert "My words." in card.text
    assert (card.data.license, card.data.tags[-1]) == ("mit", "mine")
    assert UNNAMED in file.read_text()


def test_metadata_that_a_card_lacks_is_filled_in(folder):
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [generated_from_trainer]\n---\n# Mine\n")
    data: Any = checkpoint_card(folder, repo_id="user/name").data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "video-text-to-text", "mit")
    assert data.tags == ["generated_from_trainer", *OWN["stts"].tags]


def test_metadata_that_is_no_yaml_is_refused(folder):
    (folder / "README.md").write_text("---\ntags: [a\n---\n# Mine\n")
    with pytest.raises(ValueError, match="metadata that the Hub refuses"):
        checkpoint_card(folder, repo_id="user/name")


def test_base_model_is_the_hub_id_a_model_came_from(folder):
    assert base_model_of("allenai/Molmo2-4B") == "allenai/Molmo2-4B"
    assert base_model_of("") is None
    assert base_model_of(str(folder)) is None
    write_model_card(folder, base_model="allenai/Molmo2-8B")
    assert base_model_of(str(folder)) == "allenai/Molmo2-8B"


@pytest.mark.parametrize("text", [None, f"# x\n{STOCK_SENTENCE}\n"], ids=["none", "stock"])
def test_a_card_that_says_nothing_is_replaced(folder, text):
    if text is not None:
        (folder / "README.md").write_text(text)
    assert "| `pruning_layer` | 1 " in checkpoint_card(folder, repo_id="user/name").text


def test_a_card_names_its_backbone(tmp_path):
    """Its base, classes and licence are told; how it reads videos, and how many frames."""
    qwen = TINY.with_name("stts-qwen3-vl-tiny")
    for name in ("config.json", "processor_config.json"):
        shutil.copy(qwen / name, tmp_path)
    card = written(tmp_path, base_model="Qwen/Qwen3-VL-4B-Instruct")
    assert card.data.tags == ["stts", "qwen3_vl", "video", "token-pruning", "custom_code"]
    assert "Made from [Qwen/Qwen3-VL-4B-Instruct]" in card.text
    assert "| frames | 2 per second, at most 64 |" in card.text
    assert "torchcodec (`pip install torchcodec`) to read video files" in card.text
    assert "PyAV" not in card.text


@pytest.mark.parametrize(("name", "oldest"), [("stts-tiny", "5.20"), ("stts-smolvlm-tiny", "5.23")])
def test_a_card_names_the_oldest_transformers_that_its_backbone_runs_with(tmp_path, name, oldest):
    shutil.copy(TINY.with_name(name) / "config.json", tmp_path)
    assert f"Needs transformers {oldest} or newer" in written(tmp_path).text


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["scorer"])
    peft.get_peft_model(load_tiny(), config).save_pretrained(folder)
    STTSProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_what_is_known_of_an_adapter_is_said(adapter):
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


@pytest.mark.slow
def test_instructions_of_an_adapter_work(adapter, tmp_path, run_without_package):
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
