"""Stock checkpoints whose weights have other names in files than in the model: Qwen2.5-VL's, saved and as released."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen2_5_VLProcessor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from stts_hf import STTSQwen2_5_VLForConditionalGeneration, convert_checkpoint
from stts_hf.checkpoints.doctor import examine
from stts_hf.modeling.settings_stts import PRUNING_FIELDS
from tests.checkpoints import TINY
from tests.tiny import randomise

QWEN2_5_VL = TINY.with_name("stts-qwen2-5-vl-tiny")


def write_stock(folder: Path, tied: bool) -> Any:
    """Stock Qwen2.5-VL of the size of the tiny checkpoint, every weight random, and the native processor."""
    settings = json.loads((QWEN2_5_VL / "config.json").read_text())
    vision = {name: value for name, value in settings["vision_config"].items() if name not in PRUNING_FIELDS}
    config = Qwen2_5_VLConfig(
        vision_config=vision | {"model_type": "qwen2_5_vl_vision"},
        text_config=settings["text_config"],
        tie_word_embeddings=tied,
        **{name: value for name, value in settings.items() if name.endswith("_token_id")},
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    randomise(model)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(QWEN2_5_VL)
    model.save_pretrained(folder)
    processor: Any = Qwen2_5_VLProcessor.from_pretrained(QWEN2_5_VL)
    processor.save_pretrained(folder)
    return model


def as_released(folder: Path) -> None:
    """Settings as of transformers 4.49: those of the text model lie at the top, and RoPE's have other names."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    kept = {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    config |= kept | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "mrope"}}
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    del config["vision_config"]["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["saved", "released"])
def test_weights_are_kept_and_the_doctor_finds_nothing(tmp_path, form):
    stock = write_stock(tmp_path / "stock", tied=form == "saved")
    if form == "released":
        as_released(tmp_path / "stock")
    convert_checkpoint(tmp_path / "stock", tmp_path / "ours")
    assert not [finding for found in examine(tmp_path / "ours").values() for finding in found]
    load: Any = STTSQwen2_5_VLForConditionalGeneration.from_pretrained
    loaded, info = load(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stock.state_dict().items())
    assert len(weights) == len(stock.state_dict()) + 14
    ours, theirs = (model.config.text_config.rope_parameters for model in (loaded, stock))
    assert all(ours[name] == value for name, value in theirs.items())
