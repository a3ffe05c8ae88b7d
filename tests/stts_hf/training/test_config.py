"""The configuration file of `stts-hf train`: what it takes, and that every mistake is refused by file, line and key."""

import re
import typing
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from stts_hf.modeling.configuration_stts import STTSConfig, STTSVisionConfig
from stts_hf.training.build import MODEL_SETTINGS, VISION_SETTINGS
from stts_hf.training.config import TEXT_LINEAR, PruningSection, TrainConfig, load_config, training_types
from stts_hf.training.strict_yaml import ConfigError, Tree
from tests.conftest import REPOSITORY

SMALLEST = """\
model:
  path: checkpoint
data:
  train: rows.jsonl
training:
  output_dir: out
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str, *overrides: str) -> TrainConfig:
        (tmp_path / "run.yaml").write_text(text)
        return load_config(tmp_path / "run.yaml", overrides)

    return load


def test_smallest_file(load):
    config = load(SMALLEST)
    assert (config.model.path, config.data.train, config.training) == (
        "checkpoint",
        "rows.jsonl",
        {"output_dir": "out"},
    )
    assert config.peft is None
    assert config.stts == PruningSection()


def test_sections_that_hold_nothing_are_as_if_left_out(load):
    assert load(SMALLEST + "stts:\nlearning_rates:\n").stts == PruningSection()


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("2E+1", 20.0), ("3", 3.0), (".5", 0.5)])
def test_numbers_mean_what_they_say(load, text, value):
    found = load(SMALLEST + f"learning_rates:\n  scorer: {text}\n").learning_rates["scorer"]
    assert found == value
    assert isinstance(found, float)


def test_every_option_of_training_arguments_is_taken():
    options = {item.name for item in fields(TrainingArguments) if item.init}
    elsewhere = {
        "hub_token",
        "use_liger_kernel",
        "resume_from_checkpoint",
        "parallelism_config",
        "remove_unused_columns",
        "torch_compile",
        "label_smoothing_factor",
    }
    assert options - set(training_types()) == elsewhere


def test_every_pruning_setting_is_taken_and_applied():
    own = {
        name
        for kind in (STTSVisionConfig, STTSConfig)
        for name, annotation in kind.__annotations__.items()
        if typing.get_origin(annotation) is not typing.ClassVar and name != "model_type"
    }
    of_the_tower = {"pooling_size"}  # part of the checkpoint's shape
    assert {item.name for item in fields(PruningSection)} == own - of_the_tower
    assert {item.name for item in fields(PruningSection)} == {*VISION_SETTINGS, *MODEL_SETTINGS}


# What is put behind SMALLEST (seven lines), the place that the message names, and more of it.
MISTAKES = {
    "unknown key": ("stts:\n  prunning_ratio: 0.5\n", "run.yaml:8: `stts.prunning_ratio` is no", "'pruning_ratio'?"),
    "unknown section": ("lora:\n  r: 8\n", "run.yaml:7: `lora` is no setting", "Known here: model, data"),
    "unknown training option": ("  max_stepz: 3\n", "run.yaml:7: `training.max_stepz`", "mean 'max_steps'?"),
    "training option at the top": ("max_steps: 3\n", "run.yaml:7: `max_steps`", "belongs to `training:`"),
    "part in training": ("  freeze: []\n", "run.yaml:7: `training.freeze`", "stands at the top"),
    "resume in training": ("  resume_from_checkpoint: x\n", "`training.resume_from_checkpoint`", "Pass --resume"),
    "compile in training": ("  torch_compile: true\n", "`training.torch_compile`", "Use `compile: true`"),
    "unknown part": ("learning_rates:\n  scorr: 1e-4\n", "run.yaml:7: `learning_rates` names 'scorr'", "'scorer'?"),
    "unknown part to freeze": ("freeze: [vit]\n", "run.yaml:7: `freeze` names 'vit'", "vision_tower"),
    "text for a rate": (
        "learning_rates:\n  scorer: fast\n",
        "run.yaml:8: `learning_rates.scorer` is 'fast'",
        "a number",
    ),
    "token": ("  hub_token: hf_secret\n", "run.yaml:7: `training.hub_token`", "hf auth login"),
    "rate below zero": ("learning_rates:\n  scorer: -1\n", "run.yaml:8: `learning_rates.scorer` is -1.0", "at least 0"),
    "rate of no adapter": ("learning_rates:\n  adapter: 1e-4\n", "run.yaml:8: `learning_rates.adapter`", "no `peft`"),
    "text for a number": ("  max_steps: many\n", "run.yaml:7: `training.max_steps` is 'many'", "a whole number"),
    "fraction for a whole number": ("  max_steps: 1.5\n", "`training.max_steps` is 1.5", "a whole number"),
    "number for a bool": ("  bf16: 1\n", "run.yaml:7: `training.bf16` is 1", "true or false"),
    "bool for a number": ("stts:\n  pruning_ratio: yes\n", "`stts.pruning_ratio` is True", "a number or null"),
    "unknown scheduler": ("  lr_scheduler_type: cos\n", "`training.lr_scheduler_type` is 'cos'", "'cosine'"),
    "unknown selector": ("stts:\n  selector: best\n", "run.yaml:8: `stts.selector` is 'best'", "'scorer', 'cosine'"),
    "ratio out of range": ("stts:\n  pruning_ratio: 1.5\n", "run.yaml:8: `stts.pruning_ratio` is 1.5", "from 0 to 1"),
    "ratio that is none": ("stts:\n  pruning_ratio: .nan\n", "`stts.pruning_ratio` is nan", "from 0 to 1"),
    "endless weight": ("stts:\n  temporal_loss_weight: .inf\n", "`stts.temporal_loss_weight` is inf", "below inf"),
    "key twice": ("training:\n  output_dir: b\n", "run.yaml:5: `training` is given twice", ""),
    "unknown method": ("peft:\n  method: ia3\n", "run.yaml:8: `peft.method` is 'ia3'", "'lora' or 'dora'"),
    "adapter without rank": ("peft:\n  r: 0\n", "run.yaml:8: `peft.r` is 0", "at least 1"),
    "dropout of everything": ("peft:\n  dropout: 1\n", "run.yaml:8: `peft.dropout` is 1.0", "not including, 1"),
    "adapter of nothing": ("peft:\n  target_modules: []\n", "`peft.target_modules` names nothing", "Leave it out"),
    "peft without a method": ("peft:\n", "run.yaml:7: `peft` is empty", "method: lora"),
    "another model's config": ("model_type: qwen2_5_vl\n", "run.yaml:7: `model_type` is 'qwen2_5_vl'", "of a model"),
    "section as a list": ("stts: [1]\n", "run.yaml:7: `stts` ", "keys and values"),
}


@pytest.mark.parametrize(("more", "place", "advice"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_by_line_and_key(load, more, place, advice):
    with pytest.raises(ConfigError, match=re.escape(place)) as error:
        load(SMALLEST + more)
    assert advice in str(error.value)
    assert "\n" not in str(error.value)
    assert "hf_secret" not in str(error.value)


DATA_MISTAKES = {
    "no budget": ("pack_to: 0", "`data.pack_to` is 0, but must be at least 1"),
    "two limits": ("pack_to: 9\n  max_length: 8", "`data.max_length` is for unpacked rows"),
    "padding too short": ("pack_to: 9\n  pad_to: 8", "`data.pad_to` is 8, less than the 9"),
    "samples without packing": ("max_samples_per_row: 2", "`data.max_samples_per_row` is for packed rows"),
    "no rate": ("max_fps: 0", "`data.max_fps` is 0.0"),
    "error handling": ("on_error: ignore", "`data.on_error` is 'ignore', but must be 'raise' or 'skip'"),
}


@pytest.mark.parametrize(("setting", "message"), DATA_MISTAKES.values(), ids=DATA_MISTAKES)
def test_data_settings_that_cannot_be(load, setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(SMALLEST.replace("train: rows.jsonl", f"train: rows.jsonl\n  {setting}"))


@pytest.mark.parametrize("key", ["model", "data", "path", "train", "output_dir"])
def test_what_is_needed_is_missed_by_name(load, key):
    text = re.sub(rf"^{key}:\n.*\n|^  {key}: .*\n", "", SMALLEST, flags=re.MULTILINE)
    with pytest.raises(ConfigError, match=f"`{key}`"):
        load(text)


def test_model_as_a_plain_path_is_explained(load):
    with pytest.raises(ConfigError, match="`path:` in the line below"):
        load(SMALLEST.replace("model:\n  path: checkpoint", "model: checkpoint"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "a: [1\n"], ids=["list", "empty", "no YAML"])
def test_files_that_are_no_configuration(load, text):
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(text)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_overrides_take_the_place_of_the_file(load):
    config = load(SMALLEST, "training.max_steps=10", "stts.pruning_ratio=0.3", "learning_rates.scorer=1e-3", "peft.r=4")
    assert config.training["max_steps"] == 10
    assert config.stts.pruning_ratio == 0.3
    assert config.learning_rates == {"scorer": 1e-3}
    assert config.peft is not None
    assert (config.peft.r, config.peft.target_modules) == (4, TEXT_LINEAR)


def test_a_bare_no_is_the_word_where_words_are_asked_for(load):
    assert load(SMALLEST + "  save_strategy: no\n").training["save_strategy"] == "no"


def test_override_with_null_takes_peft_away(load):
    assert load(SMALLEST + "peft:\n  r: 4\n", "peft=null").peft is None


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.max_steps", "write it as KEY.PATH=VALUE"),
        ("training.max_stepz=1", "--set training.max_stepz: `training.max_stepz` is no setting"),
        ("model.path.deep=1", "'path' is 'checkpoint' and holds no keys"),
        ("training.max_steps=[", "no YAML value"),
    ],
)
def test_bad_overrides_are_refused_as_overrides(load, assignment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(SMALLEST, assignment)


def test_overrides_are_part_of_what_is_kept(tmp_path):
    (tmp_path / "run.yaml").write_text(SMALLEST)
    tree = Tree.read(tmp_path / "run.yaml")
    tree.set("training.max_steps=10")
    assert tree.values["training"] == {"output_dir": "out", "max_steps": 10}


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "examples" / "configs").glob("*.yaml")), ids=lambda file: file.stem
)
def test_shipped_configurations_are_valid(file):
    assert load_config(file).training["output_dir"].startswith("outputs/")


def test_paper_configuration_is_the_papers():
    """Sections 3 and 4.1: rates, schedule, steps, batch, frames, layer, ratio, weight of the temporal loss."""
    config = load_config(REPOSITORY / "examples" / "configs" / "paper.yaml")
    assert config.learning_rates == {
        "language_model": 1e-5,
        "vision_tower": 5e-6,
        "connector": 5e-6,
        "scorer": 1e-4,
    }
    training = config.training
    assert (training["lr_scheduler_type"], training["warmup_steps"], training["max_steps"]) == ("cosine", 200, 6250)
    eight_processes = 8 * training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    assert eight_processes == 64
    assert (config.data.num_frames, config.data.max_fps) == (64, 2)
    assert config.data.pack_to == 10368 // 2 + 2048
    assert (config.stts.pruning_ratio, config.stts.pruning_layer, config.stts.selector) == (0.5, 3, "scorer")
    assert config.stts.temporal_loss_weight == 1.0
    assert config.peft is None
    assert not config.freeze
