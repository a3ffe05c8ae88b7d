"""`hub_configs/stts-qwen*-tiny`: complete, small, usable without the package, and what their script makes."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from tests.make_qwen_vl_tiny import FAMILIES, build_config, build_processor


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(hub_configs, family):
    return hub_configs / f"stts-{family.replace('_', '-')}-tiny"


def settings(config: dict) -> dict:
    """Without what saving and loading add."""
    added = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version")
    return {n: settings(v) if isinstance(v, dict) else v for n, v in config.items() if n not in added}


def test_settings_and_tokenizer_are_what_the_script_makes(folder, family):
    processor = build_processor((folder / "chat_template.jinja").read_text(), family)
    loaded = AutoProcessor.from_pretrained(folder)
    assert loaded.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert loaded.video_processor.to_dict() == processor.video_processor.to_dict()
    made = build_config(processor.tokenizer, family).to_dict()
    config = FAMILIES[family].model.from_pretrained(folder).config.to_dict()
    assert settings(config) == settings(made)


def test_weights_are_all_there_and_none_is_zero(folder, family):
    weights = load_file(folder / "model.safetensors")
    model, info = FAMILIES[family].model.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # Some files hold each expert alone, where the model has one matrix of all gates and ups, and one of all downs.
    names = {re.sub(r"experts\.\d+\.((gate|up)|down)_proj", lambda m: "up" if m[2] else "down", n) for n in weights}
    assert len(names) == len(model.state_dict()) - 1  # tied
    matrices = {name: weight for name, weight in weights.items() if weight.dim() > 1}
    assert all(torch.isfinite(weight).all() and weight.any() for weight in matrices.values())
