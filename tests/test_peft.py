"""LoRA on the text model with the scorer trained in full: the adapter's own folder, back on its base, and merged."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import TINY, load_tiny, logits_of, prepare, write_small_clip

peft = pytest.importorskip("peft")

# Only the text model: "q_proj" alone would hit the vision tower and the connector too.
TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
SCORER = "scorer"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(write_small_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def adapted():
    """A model with LoRA and a copy of the scorer, both moved away from where they began."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, modules_to_save=[SCORER])
    model = peft.get_peft_model(load_tiny(), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
                assert "lora" in name or ".scorer.modules_to_save." in name
    return model


@pytest.fixture(scope="module")
def adapter(adapted, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


LOAD_ADAPTER = """
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
base, adapter, inputs, output = sys.argv[1:]
with torch.no_grad():
    model = AutoModelForImageTextToText.from_pretrained(base, trust_remote_code=True).eval()
    model = PeftModel.from_pretrained(model, adapter).eval()
    torch.save(model(**torch.load(inputs), pruning_ratio=0.5).logits, output)
"""


@pytest.mark.slow
def test_adapter_loads_on_remote_code(adapter, adapted, inputs, tmp_path, run_without_package):
    torch.save(inputs, tmp_path / "inputs.pt")
    run_without_package(LOAD_ADAPTER, str(TINY), str(adapter), str(tmp_path / "inputs.pt"), str(tmp_path / "logits.pt"))
    # Another process may split sums differently.
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits_of(adapted, inputs), rtol=0, atol=1e-5)
