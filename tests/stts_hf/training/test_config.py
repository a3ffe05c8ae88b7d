"""The configuration of `stts-hf train`: what the file and the command line may say, and that mistakes are named."""

import re

import pytest

from stts_hf.training.config import ConfigError, TrainConfig, load_config

SMALLEST = """\
model_name_or_path: checkpoint
train_data: rows.jsonl
output_dir: out
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str, *overrides: str) -> TrainConfig:
        (tmp_path / "run.yaml").write_text(text)
        return load_config(tmp_path / "run.yaml", overrides, need_gpu=False)

    return load


def test_smallest_file(load):
    config = load(SMALLEST)
    assert (config.model.model_name_or_path, config.data.train_data) == ("checkpoint", ["rows.jsonl"])
    assert config.given == {"model_name_or_path": "checkpoint", "train_data": ["rows.jsonl"], "output_dir": "out"}
    assert not config.model.use_peft


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("2E+1", 20.0), ("3", 3.0)])
def test_numbers_mean_what_they_say(load, text, value):
    config = load(SMALLEST + f"learning_rates:\n  scorer: {text}\nadam_epsilon: {text}\n")
    assert config.training.learning_rates["scorer"] == value
    assert (config.training.adam_epsilon, type(config.training.adam_epsilon)) == (value, float)
    assert load(SMALLEST + "save_strategy: no\n").training.save_strategy == "no"


@pytest.mark.parametrize("text", ["0.5", "0,5", "50%", "5e-1"])
def test_shares_are_written_as_on_the_command_line(load, text):
    assert load(SMALLEST + f"pruning_ratio: {text}\n").model.pruning_ratio == 0.5
    assert load(SMALLEST, "--pruning_ratio", text).model.pruning_ratio == 0.5
    assert load(SMALLEST + f"pruning_ratio_range: [{text.replace(',', '.')}, 90%]\n").training.pruning_ratio_range == [
        0.5,
        0.9,
    ]


def test_lists_are_taken_on_the_command_line_and_in_the_file(load):
    text = SMALLEST.replace("rows.jsonl", "[a.jsonl, b.jsonl]") + "freeze: []\nreport_to: [tensorboard]\n"
    config = load(text)
    assert (config.data.train_data, config.training.freeze) == (["a.jsonl", "b.jsonl"], [])
    assert config.training.report_to == ["tensorboard"]
    config = load(text, "--train_data", "c.jsonl", "d.jsonl", "--freeze", "scorer")
    assert (config.data.train_data, config.training.freeze) == (["c.jsonl", "d.jsonl"], ["scorer"])


# Appended to SMALLEST, and what the message names.
MISTAKES = {
    "unknown key": ("prunning_ratio: 0.5\n", "`prunning_ratio`"),
    "resume in the file": ("resume_from_checkpoint: x\n", "`resume_from_checkpoint`"),
    "unknown part": ("learning_rates:\n  scorr: 1e-4\n", "`learning_rates` names 'scorr'"),
    "token": ("hub_token: hf_secret\n", "`hub_token`"),
    "a share above 1": (
        "pruning_ratio: 50\n",
        "--pruning-ratio: is 50, but must be a share from 0 (drop nothing) to 1",
    ),
    "a word for a share": (
        "pruning_ratio: half\n",
        "--pruning-ratio: is 'half', but must be a share such as 0.5 or 50%",
    ),
    "NaN in a range": ("pruning_ratio_range: [30%, nan]\n", "--pruning-ratio-range: is nan"),
    "key twice": ("output_dir: b\n", "`output_dir` is given twice"),
    "nested too deeply": (f"fsdp_config: {'[' * 3000}\n", "run.yaml"),
    "two limits": ("pack_to: 9\nmax_length: 8\n", "`max_length`"),
    "padding too short": ("pack_to: 9\npad_to: 8\n", "`pad_to` is 8"),
}


@pytest.mark.parametrize(("more", "place"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_by_name(load, more, place):
    with pytest.raises(ConfigError, match=re.escape(place)) as error:
        load(SMALLEST + more)
    assert "run.yaml" in str(error.value)
    assert "\n" not in str(error.value)
    assert "hf_secret" not in str(error.value)


@pytest.mark.parametrize("key", ["model_name_or_path", "train_data"])
def test_what_is_needed_is_missed_by_name(load, key):
    with pytest.raises(ConfigError, match=f"--{key}"):
        load(re.sub(rf"^{key}: .*\n", "", SMALLEST, flags=re.MULTILINE))


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "a: [1\n"], ids=["list", "empty", "no YAML"])
def test_files_that_are_no_configuration(load, text):
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(text)


def test_the_command_line_takes_the_place_of_the_file(load):
    text = SMALLEST + "max_steps: 5\nlearning_rates: {scorer: 1e-4, connector: 1e-6}\n"
    config = load(
        text, "--max_steps", "10", "--learning-rate=2e-5", "--learning_rates", '{"scorer": 1e-3}', "--use_peft"
    )
    assert config.training.max_steps == 10
    assert config.training.learning_rate == 2e-5
    assert config.given["learning_rates"] == {"scorer": 1e-3}
    assert config.model.use_peft
    assert load(text, "--max_steps=7", "--train_data", "x").given["max_steps"] == 7


def test_null_takes_a_setting_away(load):
    assert load(SMALLEST + "selector:\nlearning_rates:\n").given == load(SMALLEST).given
    assert load(SMALLEST + "eval_data: a.jsonl\n", "--eval_data", "null").data.eval_data is None
