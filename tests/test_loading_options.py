"""Options of `from_pretrained` that people use: every one gives the logits of the plain load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Molmo2ForConditionalGeneration

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from tests.checkpoints import TINY, load_tiny, logits_of, messages, prepare, write_small_clip
from tests.conftest import WITHOUT_PACKAGE
from tests.hub_server import Blob, LoopbackHub
from tests.stts_hf.checkpoints.convert_files import as_released, stock_model


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: kernels may sum in another order, which is worth some 16 units of the largest logit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_small_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def inputs(clip):
    return prepare(clip)


@pytest.fixture(scope="module")
def plain(inputs):
    """Logits of the plain load."""
    return logits_of(load_tiny(), inputs)


def test_half_precision_equals_a_cast_of_the_plain_load(inputs):
    dtype = torch.bfloat16
    model = load_tiny(dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    half = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    logits = logits_of(model, half)
    cast = load_tiny()
    for parameter in cast.parameters():  # not `cast.to(dtype)`, which rounds the frequencies of RoPE too
        parameter.data = parameter.data.to(dtype)
    assert torch.equal(logits, logits_of(cast, half))
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


def test_device_map_auto_with_disk_offload(inputs, plain, tmp_path):
    pytest.importorskip("accelerate")
    model = load_tiny(
        device_map="auto",
        max_memory={"cpu": "1MB"},
        offload_folder=tmp_path / "offload",
        offload_buffers=True,
    )
    assert "disk" in vars(model)["hf_device_map"].values()
    assert torch.equal(logits_of(model, inputs), plain)
    prompt = inputs["input_ids"].shape[1]
    generated = [
        each.generate(**inputs, max_new_tokens=4, do_sample=False)[0, prompt:].tolist() for each in (model, load_tiny())
    ]
    assert generated[0] == generated[1]


ATTENTION: dict[str, Any] = {
    "eager": "eager",
    "per_part": {"text_config": "eager", "vision_config": "sdpa", "adapter_config": "sdpa"},
    "part_of_them": {"vision_config": "eager"},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_implementation(inputs, plain, name):
    wanted = ATTENTION[name]
    model = load_tiny(attn_implementation=wanted)
    for part in ("text_config", "vision_config"):
        expected = wanted if isinstance(wanted, str) else wanted.get(part, "sdpa")
        assert getattr(model.config, part)._attn_implementation == expected
    assert_close(logits_of(model, inputs), plain)


# A stock Molmo2 folder, in both layouts of its keys


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """Molmo2 with the tiny checkpoint's weights, saved by stock transformers, which writes the original's key names."""
    folder = tmp_path_factory.mktemp("stock")
    molmo2 = stock_model(STTSConfig.from_pretrained(TINY))
    missing, unexpected = molmo2.load_state_dict(load_tiny().state_dict(), strict=False)
    assert not missing
    assert all(".scorer." in name for name in unexpected)
    molmo2.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, folder)
    settings = json.loads((TINY / "processor_config.json").read_text())
    settings["processor_class"], settings["video_processor"]["video_processor_type"] = (
        "Molmo2Processor",
        "Molmo2VideoProcessor",
    )
    del settings["auto_map"], settings["video_processor"]["auto_map"], settings["image_processor"]["auto_map"]
    del settings["video_processor"]["test_time_scaling"], settings["video_processor"]["pruning_ratio"]
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module", params=["original_names", "native_names", "original_config"])
def stock_layout(request, stock, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(stock, folder, dirs_exist_ok=True)
    if request.param == "native_names":
        weights = Molmo2ForConditionalGeneration.from_pretrained(stock).state_dict()
        save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
        assert any(name.startswith("model.language_model.") for name in weights)
    else:
        assert any(name.startswith("model.transformer.") for name in load_file(folder / "model.safetensors"))
    if request.param == "original_config":
        as_released(folder)
    return folder


def test_stock_molmo2_loads_with_nothing_but_the_scorer_new(stock_layout, stock, inputs):
    loaded: Any = STTSForConditionalGeneration.from_pretrained(stock_layout, output_loading_info=True)
    model, report = loaded
    assert report["missing_keys"]
    assert all(".scorer." in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    molmo2 = Molmo2ForConditionalGeneration.from_pretrained(stock).eval()
    with torch.no_grad():
        expected = molmo2(**inputs).logits
        # Rounding: the towers run the same kernels over frames in another layout.
        assert_close(model.eval()(**inputs, pruning_ratio=0).logits, expected)


def test_stock_molmo2_with_a_selector_that_needs_no_training_loads_without_a_word(stock_layout, caplog):
    model = STTSForConditionalGeneration.from_pretrained(stock_layout, selector="cosine", pruning_ratio=0.25)
    vision_config = model.model.vision_tower.config
    assert (vision_config.selector, vision_config.pruning_ratio) == ("cosine", 0.25)
    assert "scorer" not in caplog.text
    assert not any(weight.isnan().any() for weight in model.state_dict().values())


def test_stock_molmo2_saved_is_an_stts_checkpoint(stock_layout, inputs, tmp_path):
    model = STTSForConditionalGeneration.from_pretrained(stock_layout).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == ("stts", ["STTSForConditionalGeneration"])
    assert saved["auto_map"]["AutoConfig"] == "configuration_stts.STTSConfig"
    assert torch.equal(logits_of(load_tiny(tmp_path), inputs), logits_of(model, inputs))


def test_processor_of_stock_molmo2_loads_as_ours(stock, clip, inputs):
    processor: Any = STTSProcessor.from_pretrained(stock)
    assert type(processor.video_processor).__name__ == "STTSVideoProcessor"
    ours = processor.apply_chat_template(
        messages(clip), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert torch.equal(ours["input_ids"], inputs["input_ids"])
    assert torch.equal(ours["pixel_values_videos"], inputs["pixel_values_videos"])


# From a Hub

FROM_HUB = """
import json
from transformers import AutoModelForImageTextToText, AutoProcessor
for options in json.loads(sys.argv[1]):
    options["trust_remote_code"] = True
    try:
        model = AutoModelForImageTextToText.from_pretrained("user/tiny", **options)
        AutoProcessor.from_pretrained("user/tiny", **options)
        print(json.dumps(model.config.vision_config.pruning_ratio))
    except OSError:
        print(json.dumps("refused"))
"""


@pytest.mark.slow
def test_revision_cache_dir_and_local_files_only(tmp_path):
    cache = {"cache_dir": str(tmp_path / "cache")}
    with LoopbackHub() as hub:
        repository = hub.create("user/tiny", {file.name: file.read_bytes() for file in TINY.iterdir()})
        first = repository.branches["main"]
        files = repository.commits[first]
        config = json.loads(files["config.json"].content)
        config["vision_config"]["pruning_ratio"] = 0.3
        repository.commit("main", {**files, "config.json": Blob(json.dumps(config).encode(), lfs=False)}, "Drop less")
        environment = hub.environment(tmp_path / "home")

        def load(*options: dict) -> list:
            command = [sys.executable, "-c", WITHOUT_PACKAGE + FROM_HUB, json.dumps(options)]
            result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
            assert result.returncode == 0, result.stderr
            return [json.loads(line) for line in result.stdout.splitlines()]

        assert load(cache, cache | {"revision": first}, cache | {"revision": "nowhere"}) == [0.3, 0.5, "refused"]
        assert not list((tmp_path / "home").glob("hub/models--*/blobs/*"))
        hub.requests.clear()
        local = cache | {"local_files_only": True}
        assert load(local, local | {"revision": first}, {"local_files_only": True}) == [0.3, 0.5, "refused"]
        # Where PEFT is installed, transformers looks for an adapter even then; that is none of ours.
        assert {request.rsplit("/", 1)[1] for request in hub.requests} <= {"adapter_config.json"}
