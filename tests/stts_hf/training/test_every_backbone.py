"""`stts-hf train` on a checkpoint of every backbone, by nothing but its folder."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from stts_hf import PackedDataset, STTSTrainer, STTSTrainingArguments
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.cli.main import main
from stts_hf.model_parts import PARTS, parts_of
from tests.backbones import HYBRID_MIXTURES, HYBRIDS
from tests.checkpoints import ALL_TINIES, needs_num2words
from tests.training_files import train, write_config

FRAMES = 4  # of the Qwens, two tubelets


@pytest.fixture(scope="module")
def checkpoint(request) -> Path:
    return ALL_TINIES[request.param]


def of(*names: str) -> pytest.MarkDecorator:
    """The first every day: `tests/stts_hf/cli/test_train.py` trains Molmo2 in every way."""
    others = [pytest.param(name, marks=[pytest.mark.slow, needs_num2words]) for name in names[1:]]
    return pytest.mark.parametrize("checkpoint", [names[0], *others], indirect=True)


def load(folder: Path) -> Any:
    loaded: Any = family_of_checkpoint(folder).model.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def run(tmp_path: Path, data: Path, checkpoint: Path, more: str) -> Path:
    """A step on three clips, with a scorer that is not sure of anything; returns the folder."""
    output = tmp_path / "out"
    config = write_config(tmp_path, data, output, model=checkpoint, more=f"new_scorer: true\n{more}")
    assert train(config, f"--num_frames={FRAMES}") == 0
    return output


def moved(checkpoint: Path, output: Path, part_by_name: dict[str, str]) -> set[str]:
    """The parts whose weights are others; the scorer's are always, as it is a new one."""
    before, after = load(checkpoint).state_dict(), load(output).state_dict()
    return {part for name, part in part_by_name.items() if not torch.equal(before[name], after[name])}


@of("qwen3_vl", "molmo2", "qwen2_5_vl", "smolvlm")
def test_a_run_trains_its_parts_and_writes_a_whole_checkpoint(checkpoint, data, tmp_path, capsys):
    more = "pruning_ratio: 0.5\nfreeze: [vision_tower]\npack_to: 400\neval_data: " + str(data) + "\n"
    output = run(tmp_path, data, checkpoint, more)
    plan = capsys.readouterr().out
    assert f"at most {FRAMES}" in plan
    assert "parameters, frozen" in plan
    assert main(["doctor", str(output)]) == 0
    model = load(output)
    assert model.config.vision_config.pruning_ratio == 0.5
    assert moved(checkpoint, output, parts_of(model)) == set(PARTS) - {"vision_tower"}
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert log[0]["loss"] == pytest.approx(log[0]["task_loss"] + log[0]["temporal_loss"], rel=1e-4)
    assert log[0]["temporal_loss"] > 0
    assert 0 < log[0]["kept_share"] < 1
    card: Any = ModelCard.load(output / "README.md")
    assert model.config.native.model_type in card.data.tags
    assert {file.name for file in output.glob("*.py")} == {file.name for file in checkpoint.glob("*.py")}


@of("molmo2", "qwen3_vl", "smolvlm", "qwen3_vl_moe")
@pytest.mark.slow
def test_an_adapter_is_of_the_text_model_and_merges_into_a_whole_checkpoint(checkpoint, data, tmp_path):
    more = "use_peft: true\nlora_r: 2\nmerge_adapter: true\n"
    output = run(tmp_path, data, checkpoint, more)
    assert main(["doctor", str(output / "merged")]) == 0
    model = load(output / "merged")
    assert moved(checkpoint, output / "merged", parts_of(model)) == {"language_model", "scorer"}
    before, after = load(checkpoint).state_dict(), model.state_dict()
    text = [name for name in before if re.search(r"(language|text)_model\.", name)]
    changed = Counter(name.split(".")[-2] for name in text if not torch.equal(before[name], after[name]))
    adapted = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if not hasattr(model.config.text_config, "num_experts"):  # whose matrices are no linear layers
        adapted += ["gate_proj", "up_proj", "down_proj"]
    assert changed == dict.fromkeys(adapted, model.config.text_config.num_hidden_layers)
    card: Any = ModelCard.load(output / "README.md")
    assert model.config.native.model_type in card.data.tags
    assert f"stts_hf.{type(model).__name__}.from_pretrained(base)" in card.text


@pytest.mark.slow
def test_a_recurrent_text_model_trains_its_parts_and_takes_an_adapter(data, tmp_path):
    """Of experts, too."""
    checkpoint = ALL_TINIES["qwen3_5_moe"]
    output = run(tmp_path, data, checkpoint, "freeze: [vision_tower]\n")
    assert main(["doctor", str(output)]) == 0
    assert moved(checkpoint, output, parts_of(load(output))) == set(PARTS) - {"vision_tower"}
    (tmp_path / "adapter").mkdir()
    output = run(tmp_path / "adapter", data, checkpoint, "use_peft: true\nlora_r: 2\nmerge_adapter: true\n")
    before, after = load(checkpoint).state_dict(), load(output / "merged").state_dict()
    text = [name for name in before if re.search(r"(language|text)_model\.", name)]
    changed = Counter(name.split(".")[-2] for name in text if not torch.equal(before[name], after[name]))
    adapted = {name: changed[name] for name in ("q_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj")}
    assert adapted == {"q_proj": 1, "in_proj_qkv": 3, "in_proj_z": 3, "out_proj": 3, "gate_proj": 4}


@pytest.mark.parametrize("backbone", ["qwen3_5", "qwen3_5_moe"])
def test_packed_rows_of_a_recurrent_text_model_are_refused_before_data_and_weights_are_read(backbone, tmp_path, capsys):
    nowhere = tmp_path / "none.jsonl"
    config = write_config(tmp_path, nowhere, tmp_path / "no", model=ALL_TINIES[backbone], more="pack_to: 400\n")
    assert train(config) == 2
    assert "`pack_to` packs several samples into a row, but recurrent layers would carry" in capsys.readouterr().err
    (tiny,) = [some for some in (*HYBRIDS, *HYBRID_MIXTURES) if some.name == backbone]
    packed = PackedDataset([{}, {}], [3, 4], budget=9)
    with pytest.raises(ValueError, match="A `PackedDataset` puts several samples into a row, but recurrent layers"):
        STTSTrainer(tiny.model(), STTSTrainingArguments(output_dir=str(tmp_path)), train_dataset=packed)


@pytest.mark.slow
@of("qwen3_vl", "molmo2", "qwen2_5_vl", "smolvlm", "qwen3_5")
def test_a_new_scorer_alone_learns_from_an_unpruned_stock_model(checkpoint, data, tmp_path):
    """The checkpoint's own weights, under the stock model's type."""
    stock = tmp_path / "stock"
    stock.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".py":
            (stock / file.name).write_bytes(file.read_bytes())
    config = json.loads((stock / "config.json").read_text())
    native = family_of_checkpoint(checkpoint).config.native.model_type
    config["model_type"], config["vision_config"]["model_type"] = native, f"{native}_vision"
    (stock / "config.json").write_text(json.dumps(config))
    more = (
        "freeze: [language_model, vision_tower, connector]\nscorer_only: true\nscorer_target: answers\nnum_masks: 4\n"
    )
    output = run(tmp_path, data, stock, more)
    assert load(output).config.model_type == load(checkpoint).config.model_type
    assert moved(checkpoint, output, parts_of(load(output))) == {"scorer"}
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert log[0]["worth_loss"] > 0
