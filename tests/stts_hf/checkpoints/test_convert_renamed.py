"""
Stock checkpoints whose weights have other names or forms in files than in the model: Qwen2.5-VL's, saved and as
released, and mixtures of experts, whose matrices some files hold transposed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stts_hf import STTSQwen2_5_VLForConditionalGeneration
from stts_hf.checkpoints.doctor import examine
from stts_hf.checkpoints.families import STOCK
from stts_hf.cli.main import main
from tests.stts_hf.checkpoints.convert_files import stock_qwen, write_qwen


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
    tied = form == "saved"
    stock = stock_qwen("qwen2_5_vl", tied)
    write_qwen(tmp_path / "stock", "qwen2_5_vl", tied)
    if form == "released":
        as_released(tmp_path / "stock")
    # As README.md has it.
    assert main(["convert", str(tmp_path / "stock"), str(tmp_path / "ours"), "--selector", "cosine"]) == 0
    assert not [finding for found in examine(tmp_path / "ours").values() for finding in found]
    load: Any = STTSQwen2_5_VLForConditionalGeneration.from_pretrained
    loaded, info = load(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stock.state_dict().items())
    assert len(weights) == len(stock.state_dict()) + 14
    ours, theirs = (model.config.text_config.rope_parameters for model in (loaded, stock))
    assert all(ours[name] == value for name, value in theirs.items())


@pytest.mark.parametrize(
    ("backbone", "form"),
    [("qwen3_vl_moe", "saved"), ("qwen3_vl_moe", "released"), ("qwen3_5", "saved"), ("qwen3_5_moe", "saved")],
)
def test_experts_and_recurrent_layers_are_kept_and_the_doctor_finds_nothing(tmp_path, backbone, form):
    stock = stock_qwen(backbone)
    write_qwen(tmp_path / "stock", backbone)
    if form == "released":  # of each expert (in, out), where the model has (out, in)
        file = tmp_path / "stock" / "model.safetensors"
        held = {name: w.mT.contiguous() if ".experts." in name else w for name, w in load_file(file).items()}
        save_file(held, file, metadata={"format": "pt"})
    assert main(["convert", str(tmp_path / "stock"), str(tmp_path / "ours"), "--selector", "cosine"]) == 0
    assert not [finding for found in examine(tmp_path / "ours").values() for finding in found]
    load: Any = STOCK[backbone].model.from_pretrained
    loaded, info = load(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
