"""Beginnings of prompts, up to their last video or image: read by the model once, gone on with as often as wanted."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from stts_hf.modeling.cache_stts import CachedPrompt

from .answering import inputs_for, pad


@dataclass
class ReadHeads:
    """
    Heads that the model has read, to be gone on with as often as wanted.

    tokens: `input_ids`, `attention_mask` and, where there are some, `mm_token_type_ids` of the heads (H, tokens).
    cache: what the model made of them. note: what the cache holds of the tokens, None where that is all of them.
    keep_mask, token_scores: of each video (T, n), None without videos.
    """

    tokens: dict[str, torch.Tensor]
    cache: Cache
    keep_mask: tuple[torch.Tensor, ...] | None
    token_scores: tuple[torch.Tensor, ...] | None

    def __post_init__(self) -> None:
        self.columns, self.note = int(self.cache.get_seq_length()), CachedPrompt.of(self.cache)

    @property
    def num_bytes(self) -> int:
        """Memory that the cache takes, with what an answer that was cut off left of its own."""
        layers: list[Any] = self.cache.layers
        return sum(of.untyped_storage().nbytes() for layer in layers for of in (layer.keys, layer.values))

    def take(self, rows: torch.Tensor, keep: bool) -> Cache:
        """
        A cache whose rows are those of the heads, (B,). keep: whether this one stays. Then they share tensors, which
        caches that grow replace and do not write into; so there are B copies in all, beside this one.
        """
        cache = self.cache
        if keep:
            cache = copy.copy(cache)
            cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        cache.batch_select_indices(rows)  # on the host, since layers may be on several devices
        if self.note is not None:
            self.note.reorder(rows).attach(cache)
        return cache

    def rewind(self) -> None:
        """
        Cuts the cache back to the heads, however a call that made it longer ended: interrupted, it may have left some
        layers longer than others, and a layer's keys longer than its values.
        """
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.keys, layer.values = (of[..., : self.columns, :] for of in (layer.keys, layer.values))
        if self.note is not None:
            self.note.attach(self.cache)

    def answer(
        self, model: Any, cache: Cache, rows: torch.Tensor, tails: Mapping[str, torch.Tensor], **options: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        The new tokens (B, new) behind tails, and the prompts (B, head tokens + tail tokens) that they answer. cache: of
        the heads `rows` (B,). tails: of `tokenize_tails`. options: of `model.generate`.
        """
        prompts = {}
        for name, head in self.tokens.items():
            tail = tails[name] if name in tails else torch.zeros_like(tails["input_ids"])
            prompts[name] = torch.cat([head[rows], tail.to(head.device)], dim=-1)
        options |= {"return_dict_in_generate": True}
        output = model.generate(**prompts, past_key_values=cache, **options)
        return output.sequences[:, prompts["input_ids"].shape[1] :], prompts


@torch.no_grad()
def read_heads(model: Any, inputs: Mapping[str, torch.Tensor], pruning_ratio: float) -> ReadHeads:
    """What the model makes of heads, padded on the right, with their videos and images, as the processor gives them."""
    moved = inputs_for(model, inputs)
    output = model(**moved, pruning_ratio=pruning_ratio, use_cache=True, logits_to_keep=1)
    names = ("input_ids", "attention_mask", "mm_token_type_ids")
    tokens = {name: moved[name] for name in names if name in moved}
    return ReadHeads(tokens, output.past_key_values, output.get("keep_mask"), output.get("token_scores"))


def tokenize_tails(processor: Any, tails: Sequence[str]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (B, tokens), padded on the left."""
    rows = [torch.tensor(ids) for ids in processor.tokenizer(list(tails), add_special_tokens=False)["input_ids"]]
    masks = [torch.ones_like(row) for row in rows]
    return {"input_ids": pad(rows, processor.tokenizer.pad_token_id or 0), "attention_mask": pad(masks)}
