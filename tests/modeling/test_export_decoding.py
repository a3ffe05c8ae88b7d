"""A step of decoding into a static cache is one exported graph, as stock Molmo2's is."""

import pytest
import torch
from torch import nn
from transformers import StaticCache

from tests.tiny import tiny_model

TOKENS = [5, 9, 7]
CACHE_TENSORS = ("keys", "values", "cumulative_length")


class DecodingStep(nn.Module):
    """One token in, its logits out; the cache's tensors are the module's buffers."""

    def __init__(self, model):
        super().__init__()
        text = model.config.text_config
        self.model = model
        self.cache = StaticCache(config=text, max_cache_len=8)
        self.cache.early_initialization(1, text.num_key_value_heads, text.head_dim, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            for name in CACHE_TENSORS:
                self.register_buffer(f"{name}_{index}", getattr(layer, name), persistent=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.cache.layers):
            for name in CACHE_TENSORS:  # the exporter stands in for buffers, not for what the cache refers to
                setattr(layer, name, getattr(self, f"{name}_{index}"))
        return self.model(
            input_ids=input_ids, position_ids=position_ids, past_key_values=self.cache, use_cache=True
        ).logits


@pytest.mark.filterwarnings("ignore:A model attribute:UserWarning")
@torch.no_grad()
def test_decoding_with_a_static_cache_exports():
    model = tiny_model().eval().requires_grad_(False)
    steps = [(torch.tensor([[token]]), torch.tensor([[place]])) for place, token in enumerate(TOKENS)]
    exported = torch.export.export(DecodingStep(model), steps[0], strict=False).module()
    expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    for step, logits in zip(steps, expected, strict=True):
        torch.testing.assert_close(exported(*step)[0, 0], logits, atol=2e-5, rtol=0)
