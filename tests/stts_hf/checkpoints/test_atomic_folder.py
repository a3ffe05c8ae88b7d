"""Folders that appear whole or not at all."""

from stts_hf.checkpoints.atomic_folder import stale_weights


def test_stale_weights_are_those_of_the_variant_saved():
    saved = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    present = [
        *saved,
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "model.fp16.safetensors",
        "adapter_model.safetensors",
    ]
    assert stale_weights(present, saved) == ["model-00003-of-00003.safetensors", "model.safetensors"]
    assert stale_weights(present, ["model.fp16-00001-of-00001.safetensors"]) == ["model.fp16.safetensors"]
    assert stale_weights(present, ["config.json"]) == []
