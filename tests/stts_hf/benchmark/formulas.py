"""FLOPs of the model's parts in closed form: two for every multiplication and addition of a matrix product."""

from typing import Any

from stts_hf.modeling.configuration_stts import STTSConfig


def vision_layers(config: STTSConfig, layers: int, lengths: list[int]) -> int:
    """`layers` encoder layers over frames of `lengths` patches, each seeing its own frame."""
    vision = config.vision_config
    width, mlp, patches = vision.hidden_size, vision.intermediate_size, sum(lengths)
    linear = 8 * patches * width**2 + 4 * patches * width * mlp
    return layers * (linear + 4 * sum(length**2 for length in lengths) * width)


def patch_embedding(config: STTSConfig, patches: int) -> int:
    vision = config.vision_config
    return 2 * patches * vision.patch_size**2 * vision.num_channels * vision.hidden_size


def pruning_layer(
    config: STTSConfig, frames: int, patches: int, lengths: list[int], head_dim: int | None = None
) -> int:
    """Layer `l + 1`: keys and values of all patches of a frame, queries, output and MLP of the survivors alone."""
    vision = config.vision_config
    width, mlp, kept = vision.hidden_size, vision.intermediate_size, sum(lengths)
    linear = 4 * kept * width**2 + 4 * frames * patches * width**2 + 4 * kept * width * mlp
    return linear + 4 * kept * patches * vision.num_attention_heads * (head_dim or vision.head_dim)


def scorer(config: STTSConfig, blocks: int) -> int:
    """Token pooler, which makes no keys or values, and MLP over `blocks` blocks of `S` patches."""
    vision = config.vision_config
    width, mlp = vision.hidden_size, vision.intermediate_size
    window = vision.pooling_size[0] * vision.pooling_size[1]
    pooler = 8 * width**2 + 2 * width + 4 * window * vision.num_attention_heads * width
    return blocks * (pooler + 2 * (2 * width * mlp + mlp**2 + mlp))


def connector(config: STTSConfig, blocks: int) -> int:
    """Attention pooling of two feature layers over each block, and the projector."""
    adapter = config.adapter_config
    window = config.vision_config.pooling_size[0] * config.vision_config.pooling_size[1]
    features = adapter.hidden_size * len(adapter.vision_feature_layer)
    inner = adapter.num_attention_heads * adapter.head_dim
    pooling = 2 * features * inner * (1 + 2 * window) + 2 * inner * adapter.hidden_size + 4 * window * inner
    projector = 2 * adapter.intermediate_size * (2 * adapter.hidden_size + adapter.text_hidden_size)
    return blocks * (pooling + projector)


def text_linears(config: STTSConfig, tokens: int) -> int:
    text: Any = config.text_config
    width, heads, cached = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    attention = 2 * width * text.head_dim * (2 * heads + 2 * cached)
    return tokens * text.num_hidden_layers * (attention + 6 * width * text.intermediate_size)


def text_attention(config: STTSConfig, tokens: int) -> int:
    """Every token of one row to every other: the mask saves nothing in `torch.utils.flop_counter`'s view."""
    text = config.text_config
    return 4 * tokens**2 * text.num_attention_heads * text.head_dim * text.num_hidden_layers


def head(config: STTSConfig, tokens: int) -> int:
    return 2 * tokens * config.text_config.hidden_size * config.text_config.vocab_size
