"""Where nothing is pruned the model is stock Qwen3-VL: same weights, same logits, same gradients, same tokens."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration
from tests.tiny_qwen3_vl import (
    Image,
    Video,
    batch,
    samples,
    stock_twin,
    tiny_config,
    tiny_model,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config(pruning_ratio=0.0), trained_scorer=False)


@pytest.fixture(scope="module")
def stock(model):
    return stock_twin(model)


@pytest.mark.parametrize("part", [Video(4), Image()], ids=["video", "image"])
@pytest.mark.parametrize("taps", [(4, 1), (2, 0, 5), ()], ids=str)
def test_any_taps_are_stocks(taps, part):
    model = tiny_model(tiny_config(taps=taps, pruning_ratio=0.0), trained_scorer=False)
    inputs = batch(samples([[3, part, 5]]))
    with torch.no_grad():
        theirs = stock_twin(model)(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, theirs, atol=1e-6, rtol=0)


def test_what_is_saved_is_what_is_loaded_and_no_file_is_molmo2s(hub_configs, tmp_path):
    model = tiny_model(tiny_config(pruning_ratio=0.3, selector="cosine", model_overrides={"temporal_loss_weight": 0.5}))
    model.save_pretrained(tmp_path / "once")
    files = {file.name for file in (tmp_path / "once").iterdir()}
    code = {name for name in files if name.endswith(".py")}
    assert code == {link.name for link in (hub_configs / "stts-qwen3-vl-tiny").glob("*.py")}
    assert not code & {"vision_stts.py", "modeling_stts.py", "raster_tower_stts.py", "causal_stts.py"}
    again = STTSQwen3VLForConditionalGeneration.from_pretrained(tmp_path / "once")
    assert again.config.temporal_loss_weight == 0.5
    assert again.config.vision_config.selector == "cosine"
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    again.save_pretrained(tmp_path / "twice")
    for name in files:
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "once" / name).read_bytes(), name
    saved = json.loads((tmp_path / "once" / "config.json").read_text())
    assert saved["model_type"] == "stts_qwen3_vl"
    assert set(saved["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForImageTextToText",
        "AutoModelForMultimodalLM",
    }


def test_auto_classes_know_it_once_the_package_is_used(tmp_path):
    import stts_hf

    assert stts_hf.STTSQwen3VLForConditionalGeneration is STTSQwen3VLForConditionalGeneration
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "modeling_stts_qwen3_vl.py").unlink()  # the package's code is used
    assert type(AutoConfig.from_pretrained(tmp_path)) is stts_hf.STTSQwen3VLConfig
    assert isinstance(AutoModelForImageTextToText.from_pretrained(tmp_path), STTSQwen3VLForConditionalGeneration)
