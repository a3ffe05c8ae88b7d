"""`convert_checkpoint`: every source form becomes a complete folder with the source's weights and settings."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from stts_hf.checkpoints.convert import convert_checkpoint
from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.cli.main import main
from stts_hf.modeling.configuration_stts import STTSConfig
from tests.checkpoints import TINIES
from tests.fixture_files import checkpoint_fixtures, checkpoint_forms
from tests.stts_hf.checkpoints.convert_files import (
    contents,
    stock_model,
    stock_qwen,
    write_base,
    write_molmo2,
    write_qwen3_vl,
)
from tests.stts_hf.checkpoints.original_weights import native_weights, read_original

MOLMO2_FORMS = ["original", "native", "shards", "released"]
QWEN3_VL_FORMS = ["qwen3_vl", "qwen3_vl_shards", "qwen3_vl_released"]
STOCK_FORMS = [*MOLMO2_FORMS, *QWEN3_VL_FORMS]
FORMS = checkpoint_forms()


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder with a stock folder of every form, and `base` for the reference checkpoints."""
    folder = tmp_path_factory.mktemp("sources")
    for form in MOLMO2_FORMS:
        write_molmo2(folder / form, form)
    for form in QWEN3_VL_FORMS:
        write_qwen3_vl(folder / form, form)
    write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory) -> Path:
    """The conversion of every source, under the source's name."""
    folder = tmp_path_factory.mktemp("converted")
    for form in STOCK_FORMS:
        convert_checkpoint(sources / form, folder / form)
    for path in FORMS:
        convert_checkpoint(path, folder / path.name, base=sources / "base")
    return folder


ALL = [*STOCK_FORMS, *(form.name for form in FORMS)]


def load(folder: Path) -> Any:
    loaded: Any = family_of_checkpoint(folder).model.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def vision_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["vision_config"]


@pytest.mark.parametrize("form", STOCK_FORMS)
def test_weights_of_a_stock_model_are_kept(converted, form):
    expected = (stock_model() if form in MOLMO2_FORMS else stock_qwen()).state_dict()
    weights = load(converted / form).state_dict()
    scorer = {name for name in weights if ".scorer." in name}
    assert weights.keys() - scorer == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_weights_of_an_original_checkpoint_are_kept(converted, form):
    expected = native_weights(read_original(form))
    weights = load(converted / form.name).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("form", "size"), [("original", "50GB"), ("qwen3_vl", "50GB"), ("qwen3_vl", "40KB")])
def test_files_are_those_that_saving_the_loaded_model_writes(sources, converted, tmp_path, form, size):
    folder = converted / form
    if size != "50GB":
        convert_checkpoint(sources / form, tmp_path / "new", max_shard_size=size)
        folder = tmp_path / "new"
    load(folder).save_pretrained(tmp_path / "again", max_shard_size=size)
    written, saved = contents(folder), contents(tmp_path / "again")
    assert {name: written[name] == content for name, content in saved.items()} == dict.fromkeys(saved, True)


@pytest.mark.parametrize("form", ALL)
def test_the_doctor_finds_nothing_and_nothing_of_the_source(converted, form):
    assert not [finding for found in examine(converted / form).values() for finding in found]
    files = contents(converted / form)
    assert not [name for name, content in files.items() if b"molmo2.Molmo2" in content and name.endswith(".json")]


def test_processor_and_template_of_files_as_released_are_those_of_today(sources, converted):
    for name in ("processor_config.json", "generation_config.json", "chat_template.jinja"):
        assert (converted / "qwen3_vl_released" / name).read_bytes() == (converted / "qwen3_vl" / name).read_bytes()
    assert (converted / "qwen3_vl" / name).read_bytes() == (TINIES["qwen3_vl"] / name).read_bytes()


def test_frames_of_a_training_checkpoint_carry_over(converted):
    processor = json.loads((converted / FORMS[0].name / "processor_config.json").read_text())
    assert processor["video_processor"]["num_frames"] == 8  # `max_frames`; the base has 17
    assert processor["video_processor"]["max_fps"] == 2  # the checkpoint names none, the base does
    assert processor["use_frame_special_tokens"] is True


def test_settings_can_be_overridden(sources, tmp_path):
    given: dict[str, Any] = {"packing": "varlen", "pruning_ratio": 0.3, "selector": "cosine"}
    convert_checkpoint(FORMS[0], tmp_path / "new", base=sources / "base", **given)
    vision = vision_config(tmp_path / "new")
    assert {name: vision[name] for name in given} == given
    assert not vision["refill_single_frame_bins"]
    processor = json.loads((tmp_path / "new" / "processor_config.json").read_text())
    assert processor["video_processor"]["pruning_ratio"] == 0.3


def test_a_new_ratio_is_not_outranked_by_a_saved_one(tmp_path):
    copytree(TINIES["molmo2"], tmp_path / "source")
    generation = tmp_path / "source" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_bytes()) | {"pruning_ratio": 0.9}))
    convert_checkpoint(tmp_path / "source", tmp_path / "same")
    convert_checkpoint(tmp_path / "source", tmp_path / "new", pruning_ratio=0.3)
    same, new = (json.loads((tmp_path / name / "generation_config.json").read_bytes()) for name in ("same", "new"))
    assert (same["pruning_ratio"], new.get("pruning_ratio")) == (0.9, None)


def test_a_folder_below_home_is_no_base_model_and_claims_no_licence(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(sources))
    convert_checkpoint("~/native", tmp_path / "new")
    assert not {"base_model", "license"} & card_of(tmp_path / "new").keys()


def test_a_checkpoint_without_pruning_gets_the_defaults_and_a_new_scorer(sources, tmp_path):
    write_training_checkpoint(tmp_path / "source", without_pruning=True)
    result = convert_checkpoint(tmp_path / "source", tmp_path / "new", base=sources / "base")
    assert vision_config(tmp_path / "new")["packing"] == "varlen"
    assert not result.scorer_trained
    assert "untrained" in result.notes[0]


def test_a_new_scorer_ends_in_weights_of_zero_and_follows_the_seed(sources, tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        convert_checkpoint(sources / "native", tmp_path / name, seed=seed)
    one, same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "same", "other"))
    scorer = "model.vision_backbone.image_vit.scorer"
    assert not one[f"{scorer}.score_layer.weight"].any()
    assert one[f"{scorer}.input_layer.weight"].std() == pytest.approx(0.02, rel=0.1)  # `initializer_range`
    assert all(torch.equal(one[name], same[name]) for name in one)
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing
    assert all(name.startswith(scorer) for name in differing)


def test_dtype_is_the_sources_unless_given(sources, converted, tmp_path):
    convert_checkpoint(sources / "native", tmp_path / "new", dtype="bfloat16")
    wide, narrow = (load_file(folder / "model.safetensors") for folder in (converted / "native", tmp_path / "new"))
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert all(torch.equal(narrow[name], tensor.to(torch.bfloat16)) for name, tensor in wide.items())
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("form", [FORMS[0].name, "qwen3_vl"])
def test_a_converted_checkpoint_converts_to_itself(converted, tmp_path, form):
    result = convert_checkpoint(converted / form, tmp_path / "new")
    assert result.scorer_trained == (form == FORMS[0].name)
    before, after = contents(converted / form), contents(tmp_path / "new")
    assert {name for name in before if before[name] != after[name]} <= {"README.md"}


def test_base_of_a_molmo2_folder_without_processor(sources, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((sources / "native" / name).read_bytes())
    with pytest.raises(ValueError, match="--base"):
        convert_checkpoint(bare, tmp_path / "new")
    convert_checkpoint(bare, tmp_path / "new", base=sources / "native")
    assert STTSConfig.from_pretrained(tmp_path / "new").model_type == "stts"


def test_a_full_tower_is_cut_to_the_layers_that_are_read(sources, tmp_path):
    write_training_checkpoint(tmp_path / "source", more_layers=2)
    convert_checkpoint(tmp_path / "source", tmp_path / "new", base=sources / "base")
    assert vision_config(tmp_path / "new")["num_hidden_layers"] == 9


def test_the_command_converts_and_tells_what_it_made(sources, tmp_path, capsys):
    arguments = ["convert", str(FORMS[0]), str(tmp_path / "new"), "--base", str(sources / "base")]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "trained" in output
    assert "50% after layer 3, scorer, with refill" in output


def write_training_checkpoint(folder: Path, without_pruning: bool = False, more_layers: int = 0) -> None:
    """The unsharded reference checkpoint, without a scorer or with ViT layers that nothing reads."""
    import yaml  # type: ignore[import-untyped]

    source = checkpoint_fixtures()[0] / "unsharded"
    config = yaml.safe_load((source / "config.yaml").read_text())
    weights = read_original(source)
    vit = config["model"]["vision_backbone"]["vit"]
    if without_pruning:
        vit["prune"] = False
        weights = {name: tensor for name, tensor in weights.items() if "temporal_token_scorer" not in name}
    blocks = "vision_backbone.image_vit.transformer.resblocks."
    for layer in range(vit["image_num_layers"], vit["image_num_layers"] + more_layers):
        last = f"{blocks}8."
        copies = {f"{blocks}{layer}.{name.removeprefix(last)}": weights[name] for name in weights if last in name}
        weights |= copies
    vit["image_num_layers"] += more_layers
    folder.mkdir()
    torch.save(weights, folder / "model.pt")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


CARD = """---
license: other
license_name: research
license_link: https://example.com/terms
base_model: someone/molmo2
datasets: [someone/clips, someone/more]
---
# Mine
"""


def card_of(folder: Path) -> dict:
    return ModelCard.load(folder / "README.md").data.to_dict()


@pytest.mark.parametrize("place", ["source", "base"])
def test_licence_base_model_and_data_sets_of_a_card_are_carried_over(sources, tmp_path, place):
    for name, origin in (("source", "native"), ("base", "original")):
        copytree(sources / origin, tmp_path / name)
    (tmp_path / place / "README.md").write_text(CARD)
    convert_checkpoint(tmp_path / "source", tmp_path / "new", base=tmp_path / "base")
    data = card_of(tmp_path / "new")
    assert (data["license"], data["license_name"]) == ("other", "research")
    assert data["license_link"] == "https://example.com/terms"
    assert (data["base_model"], data["datasets"]) == ("someone/molmo2", ["someone/clips", "someone/more"])
    assert "from [someone/molmo2]" in (tmp_path / "new" / "README.md").read_text()
