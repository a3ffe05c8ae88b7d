"""Vision tokens in a text with one position per token, where images and videos share a placeholder.

Which of them are videos', what is added onto them, and what they see, in both directions or before them alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import and_masks, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .pruning_stts import PrunedInputs

MASKED_TEXT_ATTENTION = ("eager", "sdpa", "flex_attention")


def placeholders_of_videos(
    placeholders: torch.Tensor, frame_starts: torch.Tensor, image_starts: torch.Tensor
) -> torch.Tensor:
    """Placeholders (B, L) whose nearest opening token before them opens a frame and not an image."""
    place = torch.arange(placeholders.shape[-1], device=placeholders.device).expand_as(placeholders)
    last_start = torch.where(frame_starts | image_starts, place, 0).cummax(-1).values
    return placeholders & frame_starts.gather(-1, last_start)


def features_of_rows(pruned: PrunedInputs) -> Any:
    """One entry per row, in the order of its placeholders: beams and samples then repeat whole rows."""
    some = pruned.features[0][1]
    if len(pruned.features) == 1:
        return pruned.by_row(0, some)
    merged = some.new_zeros(*pruned.kept_indices.shape, some.shape[-1])
    for placeholders, features in pruned.features:
        merged = merged.masked_scatter(placeholders[..., None].expand_as(merged), features.to(merged))
    everywhere = torch.stack([placeholders for placeholders, _ in pruned.features]).any(0)
    return [row[places] for row, places in zip(merged, everywhere, strict=True)]


def encoder_outputs(pruned: PrunedInputs, modality: str) -> dict[str, Any]:
    """Images' and videos' features as an argument of native `generate`, as one modality, which has the placeholder."""
    if not pruned.features:
        return {}
    return {"mm_encoder_outputs": {modality: BaseModelOutputWithPooling(pooler_output=features_of_rows(pruned))}}


def add_features(embeds: torch.Tensor, features: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """
    Embeddings (B, L', text hidden size) with features (placeholders, text hidden size) added onto their placeholders
    (B, L').
    """
    for placeholders, added in features:
        # A stable sort of the flags brings the placeholders to the front. Boolean indexing, or the backward pass of a
        # masked scatter, would force a host-device sync for their number.
        places = torch.sort((~placeholders).flatten().to(torch.int8), stable=True).indices[: len(added)]
        places = places.to(embeds.device)
        spread = torch.zeros_like(embeds).flatten(0, 1).index_copy(0, places, added.to(embeds))
        embeds = embeds + spread.view_as(embeds)
    return embeds


def make_mask(
    text_config: PreTrainedConfig, pruned: PrunedInputs, inputs_embeds: torch.Tensor, past_key_values: Cache | None
) -> Any:
    """
    What the tokens that are left, inputs_embeds (B, L', text hidden size), see of each other and of the cache: causal,
    but bidirectional among the vision tokens of a sample, and closed between samples of a row.
    """
    tokens = pruned.tokens
    samples, padding_mask, types = tokens.sample_ids, tokens.padding_mask, tokens.mm_token_type_ids
    assert padding_mask is not None  # `gather_tokens` makes it
    if tokens.shape[-1] == 1 and samples is None and text_config._attn_implementation != "flex_attention":
        # A token behind a cache sees all of it. transformers leaves out a mask that hides nothing, for faster kernels.
        return create_causal_mask(
            config=text_config,
            inputs_embeds=inputs_embeds,
            attention_mask=padding_mask,
            past_key_values=past_key_values,
        )
    # Always given: a plain causal mask may be left out, and gaps in the positions then look like packed samples.
    blocks = torch.full_like(pruned.kept_indices, -1)
    if types is not None:
        blocks = torch.where(types == 1, 0 if samples is None else samples, blocks)
    past = padding_mask.shape[-1] - blocks.shape[-1]
    blocks = nn.functional.pad(blocks, (past, 0), value=-1)
    conditions = []  # beside causality; none of them holds in the vision block, which says so itself
    if samples is not None:
        last = samples.shape[-1] - 1  # a static cache has more columns than that, all of them out of sight
        conditions.append(lambda b, h, q, kv: samples[b, q] == samples[b, kv.clamp(max=last)])
    shown: torch.Tensor | None = padding_mask
    if text_config._attn_implementation == "flex_attention":
        # transformers would check whether anything is hidden, which forces a host-device sync.
        seen, end = padding_mask.bool(), padding_mask.shape[-1] - 1
        blocks = torch.where(seen, blocks, -1)
        conditions.append(lambda b, h, q, kv: seen[b, kv.clamp(max=end)])
        shown = None
    mask = create_causal_mask(
        config=text_config,
        inputs_embeds=inputs_embeds,
        attention_mask=shown,
        past_key_values=past_key_values,
        block_sequence_ids=blocks,
        and_mask_function=and_masks(*conditions) if conditions else None,
    )
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:  # flash attention takes the padding mask, for text alone
        # Filler before a row would see nothing, and the backward pass of some kernels is NaN then: it sees itself.
        # Out of place, since a compiler cannot write into a diagonal view.
        new = mask.shape[-2]
        itself = torch.eye(new, mask.shape[-1] - past, dtype=torch.bool, device=mask.device)
        itself = nn.functional.pad(itself, (past, 0)) & ~padding_mask[:, None, past:, None].bool()
        mask = mask | itself if mask.dtype == torch.bool else mask.masked_fill(itself, 0)
    return mask


def pad_types(types: torch.Tensor | None, past_key_values: Cache | None, num_tokens: int) -> torch.Tensor | None:
    """
    `mm_token_type_ids` (B, columns + num_tokens) of a cache's columns and of new tokens. Native code reads types by
    column, so those of new tokens alone would be taken for the first columns'.
    """
    if types is None or past_key_values is None or num_tokens == 1 or types.shape[-1] != num_tokens:
        return types
    return nn.functional.pad(types, (int(past_key_values.get_seq_length()), 0))
