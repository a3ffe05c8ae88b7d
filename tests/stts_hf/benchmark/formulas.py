"""FLOPs of the model's parts in closed form: two for every multiplication and addition of a matrix product.

Forward passes. Attention stands apart from the other products where the difference matters: its gradients take two
and a half times its forward pass in the kernels of scaled dot product attention, which compute the logits once more,
and those of every other product twice.
"""

import math
from typing import Any

from stts_hf.modeling.configuration_stts import STTSConfig


def vision_layers(config: Any, layers: int, lengths: list[int]) -> int:
    """`layers` encoder layers over frames of `lengths` patches, each seeing its own frame."""
    return vision_linears(config, layers, sum(lengths)) + vision_attention(config, layers, lengths)


def vision_linears(config: Any, layers: int, patches: int) -> int:
    vision = config.vision_config
    width, mlp = vision.hidden_size, vision.intermediate_size
    return layers * (8 * patches * width**2 + 4 * patches * width * mlp)


def vision_attention(config: Any, layers: int, lengths: list[int]) -> int:
    return layers * 4 * sum(length**2 for length in lengths) * config.vision_config.hidden_size


def patch_embedding(config: STTSConfig, patches: int) -> int:
    vision = config.vision_config
    return 2 * patches * vision.patch_size**2 * vision.num_channels * vision.hidden_size


def pruning_layer(
    config: STTSConfig, frames: int, patches: int, lengths: list[int], head_dim: int | None = None
) -> int:
    """Layer `l + 1`: keys and values of all patches of a frame, queries, output and MLP of the survivors alone."""
    linears = pruning_layer_linears(config, frames, patches, sum(lengths))
    return linears + pruning_layer_attention(config, patches, sum(lengths), head_dim)


def pruning_layer_linears(config: Any, frames: int, patches: int, kept: int) -> int:
    vision = config.vision_config
    width, mlp = vision.hidden_size, vision.intermediate_size
    return 4 * kept * width**2 + 4 * frames * patches * width**2 + 4 * kept * width * mlp


def pruning_layer_attention(config: STTSConfig, patches: int, kept: int, head_dim: int | None = None) -> int:
    vision = config.vision_config
    return 4 * kept * patches * vision.num_attention_heads * (head_dim or vision.head_dim)


def biased_head_dim(head_dim: int, dtype: str) -> int:
    """Of layer `l + 1` where keys carry a bias, in one entry more, three in half precision; filled up to eights."""
    return 8 * math.ceil((head_dim + (1 if dtype == "float32" else 3)) / 8)


def scorer(config: Any, blocks: int, window: int = 9) -> int:
    """Token pooler and MLP over `blocks` blocks of `S = window` patches; plain products all."""
    vision = config.vision_config
    width, mlp = vision.hidden_size, vision.intermediate_size
    pooler = 4 * width**2 + window * (4 * width**2 + 4 * width)
    return blocks * (pooler + 2 * (2 * width * mlp + mlp**2 + mlp))


def connector_linears(config: STTSConfig, blocks: int) -> int:
    adapter = config.adapter_config
    window = config.vision_config.pooling_size[0] * config.vision_config.pooling_size[1]
    features = adapter.hidden_size * len(adapter.vision_feature_layer or ())
    inner = adapter.num_attention_heads * adapter.head_dim
    pooling = 2 * features * inner * (1 + 2 * window) + 2 * inner * adapter.hidden_size
    projector = 2 * adapter.intermediate_size * (2 * adapter.hidden_size + adapter.text_hidden_size)
    return blocks * (pooling + projector)


def connector_attention(config: STTSConfig, blocks: int) -> int:
    adapter = config.adapter_config
    window = config.vision_config.pooling_size[0] * config.vision_config.pooling_size[1]
    return 4 * blocks * window * adapter.num_attention_heads * adapter.head_dim


def text_linears(config: Any, tokens: int) -> int:
    text: Any = config.text_config
    width, heads, cached = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    attention = 2 * width * text.head_dim * (2 * heads + 2 * cached)
    return tokens * text.num_hidden_layers * (attention + 6 * width * text.intermediate_size)


def text_attention(config: Any, tokens: int) -> int:
    """Every token of one row to every other: the mask saves nothing in `torch.utils.flop_counter`'s view."""
    text = config.text_config
    return 4 * tokens**2 * text.num_attention_heads * text.head_dim * text.num_hidden_layers


def last_products(config: Any, patches_of_layers: int, tokens: int) -> int:
    """
    The product that ends each layer of the ViT and the LLM. Recomputing a layer stops before it: all that gradients
    need is there by then. `patches_of_layers`: summed over the ViT's layers.
    """
    vision, text = config.vision_config, config.text_config
    vit = 2 * patches_of_layers * vision.hidden_size * vision.intermediate_size
    return vit + 2 * tokens * text.num_hidden_layers * text.hidden_size * text.intermediate_size


def head(config: Any, tokens: int) -> int:
    return 2 * tokens * config.text_config.hidden_size * config.text_config.vocab_size
