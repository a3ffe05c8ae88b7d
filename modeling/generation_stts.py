"""`generate` for a prompt that loses tokens: prune first, generate natively, give the whole prompt back."""

import copy

import torch
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.molmo2.modeling_molmo2 import Molmo2ForConditionalGeneration

from .checks_stts import check_text_attention
from .inputs_stts import PrunedInputs
from .sequence_stts import CachedPrompt, any_row_is_packed
from .settings_stts import check_pruning_ratio

VISION_INPUTS = (
    "pixel_values",
    "image_token_pooling",
    "image_grids",
    "pixel_values_videos",
    "video_token_pooling",
    "video_grids",
)


class WholePromptStreamer:
    """Passes a stream on, with the caller's prompt in place of the shortened one that native `generate` puts first."""

    def __init__(self, streamer, prompt: torch.Tensor):
        self.streamer = streamer
        self.prompt = prompt

    def put(self, value):
        self.streamer.put(value if self.prompt is None else self.prompt)
        self.prompt = None

    def end(self):
        self.streamer.end()


class VocabularyPromptLookup(CandidateGenerator):
    """Prompt lookup whose candidates end where the prompt leaves the LM head's vocabulary, as placeholders do."""

    def __init__(self, lookup: PromptLookupCandidateGenerator):
        # It would index scores with every candidate, placeholders too. Forbidden candidates still lose against the
        # model's own processed scores.
        lookup.logits_processor = None
        self.lookup = lookup

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs):
        candidates, scores = self.lookup.get_candidates(input_ids, **kwargs)
        length = input_ids.shape[1]
        outside = (candidates[0, length:] >= self.lookup.vocab_size).nonzero()
        return candidates[:, : length + int(outside[0])] if outside.numel() else candidates, scores

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        return self.lookup.update_candidate_strategy(input_ids, scores, num_matches)


class STTSGeneration:
    """Mixin that goes before `GenerationMixin`."""

    def _get_candidate_generator(self, *args, **kwargs):
        generator = super()._get_candidate_generator(*args, **kwargs)
        if isinstance(generator, PromptLookupCandidateGenerator):
            return VocabularyPromptLookup(generator)
        return generator

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor | None = None, generation_config=None, pruning_ratio=None, **kwargs):
        """
        As transformers' `generate`, with every decoding method it has; returns the caller's whole prompt, then the new
        tokens. `pruning_ratio` replaces the config's for this call; `max_length` and `min_length` count the whole
        prompt. `past_key_values` of an earlier call may be reused with a longer prompt: leave out the videos that it
        has already seen. Raises `ValueError` where cache and prompt do not belong together.
        """
        if pruning_ratio is not None:
            check_pruning_ratio(pruning_ratio)
        if kwargs.pop("pruned_length", None) is not None:
            raise ValueError("`pruned_length` is for training with `forward`; leave it out of `generate`.")
        cache = kwargs.get("past_key_values")
        cached: CachedPrompt | None = getattr(cache, "pruned_prompt", None)
        if kwargs.get("pixel_values_videos") is None and cached is None:
            position_ids = kwargs.get("position_ids")
            if position_ids is not None and not (cache is not None and cache.get_seq_length()):
                check_one_sample(position_ids, kwargs.get("attention_mask"))
            return super().generate(inputs, generation_config, **kwargs)
        check_text_attention(self.config.text_config)
        if "prepare_inputs_for_generation" not in vars(Molmo2ForConditionalGeneration):
            check_old_transformers(
                cache,
                setting("cache_implementation", kwargs, generation_config, self.generation_config),
                setting("prefill_chunk_size", kwargs, generation_config, self.generation_config),
            )
        prompt = inputs if inputs is not None else kwargs.pop("input_ids", None)
        embeds = kwargs.pop("inputs_embeds", None)
        if (prompt is None) == (embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds` to generate from videos.")
        whole = prompt if prompt is not None else embeds
        attention_mask = kwargs.get("attention_mask")
        if attention_mask is None and prompt is not None:
            pad, end = (
                setting(name, kwargs, generation_config, self.generation_config)
                for name in ("pad_token_id", "eos_token_id")
            )
            attention_mask = infer_mask(prompt, pad, end)
        new = tokens_after_cache(whole, attention_mask, cached, cache)
        if cached is not None and setting("use_cache", kwargs, generation_config, self.generation_config) is False:
            raise ValueError("`use_cache=False` came with `past_key_values` to be used; leave out one of them.")
        position_ids = kwargs.get("position_ids")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"`attention_mask` has {attention_mask.dim()} dimensions, but `generate` needs the 2D padding mask."
            )
        if position_ids is not None and position_ids.shape[-1] == whole.shape[1]:
            check_one_sample(position_ids.expand(whole.shape[:2]), attention_mask)
        if position_ids is None and attention_mask is not None and cached is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)
        kwargs.pop("image_num_crops", None)
        pruned = self.model.prune_inputs(
            input_ids=new if embeds is None else None,
            inputs_embeds=new if prompt is None else None,
            attention_mask=attention_mask,
            position_ids=None if position_ids is None else position_ids[:, -new.shape[1] :],
            past_key_values=cache,
            mm_token_type_ids=kwargs.get("mm_token_type_ids"),
            pruning_ratio=pruning_ratio,
            **{name: kwargs.pop(name) for name in VISION_INPUTS if name in kwargs},
        )
        length = pruned.kept_indices.shape[-1]
        kwargs.update(native_inputs(self.model, pruned))
        shortened_by = whole.shape[1] - length
        generation_config = shorten_limits(self.generation_config, generation_config, kwargs, shortened_by)
        chunk_size = setting("prefill_chunk_size", kwargs, generation_config, self.generation_config)
        if chunk_size is not None and pruned.mm_token_type_ids is not None:
            # Vision tokens attend to each other in both directions, so no chunk may end between them.
            vision_columns = pruned.mm_token_type_ids.any(0).nonzero()
            kwargs["prefill_chunk_size"] = max(chunk_size, *vision_columns[-1:, 0].add(1).tolist(), 1)
        if kwargs.get("streamer") is not None and prompt is not None:
            kwargs["streamer"] = WholePromptStreamer(kwargs["streamer"], prompt.cpu())
        if cached is not None:
            del cache.pruned_prompt  # the steps below count in the cache's own columns
        try:
            output = super().generate(None, generation_config, **kwargs)
        except BaseException:
            if cached is not None:
                cache.pruned_prompt = cached
            raise
        sequences = answer = output if isinstance(output, torch.Tensor) else output.sequences
        if prompt is not None:
            copies = sequences.shape[0] // prompt.shape[0]
            answer = sequences[:, length:]
            sequences = torch.cat([prompt.repeat_interleave(copies, 0).to(answer.device), answer], dim=-1)
        beams = (setting("num_beams", kwargs, generation_config, self.generation_config) or 1) > 1
        if isinstance(output, torch.Tensor):
            remember_prompt(cache, pruned.cached_after, answer, beams)
            return sequences
        output.sequences = sequences
        remember_prompt(getattr(output, "past_key_values", None), pruned.cached_after, answer, beams)
        return output


def infer_mask(prompt: torch.Tensor, pad_token_id: int | None, eos_token_id: int | list[int] | None):
    """As transformers does without a mask: hides padding in (B, L), unless padding may also be the end of a text."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if pad_token_id is None or pad_token_id in ends or not (prompt == pad_token_id).any():
        return None
    return (prompt != pad_token_id).long()


def check_old_transformers(cache, cache_implementation: str | None, prefill_chunk_size: int | None) -> None:
    """Raises `ValueError` for what transformers before 5.23 silently decodes as if vision tokens were causal."""
    static = "static" in (cache_implementation or "") or getattr(cache, "is_compileable", False)
    if static or prefill_chunk_size is not None:
        raise ValueError(
            f"{'A static cache' if static else '`prefill_chunk_size`'} with video tokens needs transformers 5.23 or "
            "later: before, Molmo2's vision tokens would silently attend causally. Upgrade, or leave it out."
        )


def check_one_sample(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raises `ValueError` for rows (B, L) whose positions start over: a packed row cannot be gone on with."""
    fits = attention_mask is not None and attention_mask.shape == position_ids.shape
    if any_row_is_packed(position_ids, attention_mask if fits else None):
        raise ValueError(
            "`position_ids` start over, as for several samples in a row, but `generate` goes on with one text per row. "
            "Pass the samples as rows of their own, or leave out `position_ids`."
        )


def tokens_after_cache(
    whole: torch.Tensor, attention_mask: torch.Tensor | None, cached: CachedPrompt | None, cache
) -> torch.Tensor:
    """
    The part of a prompt (B, L) that a cache has not seen. As in transformers, a mask longer than the prompt says that
    the prompt is only that part. Raises `ValueError` for a prompt that does not go on where the cache ends.
    """
    seen = cached.seen if cached is not None else (cache.get_seq_length() if cache is not None else 0)
    if not seen or (attention_mask is not None and attention_mask.shape[-1] == seen + whole.shape[1]):
        return whole
    if whole.shape[1] <= seen:
        raise ValueError(
            f"The prompt has {whole.shape[1]} tokens, but `past_key_values` has already seen {seen}. Pass the whole "
            "conversation, dropped video tokens included, with at least one new token."
        )
    known = cached.token_ids if cached is not None else None
    if known is not None and whole.dim() == 2 and not torch.equal(known.to(whole.device), whole[:, :seen]):
        raise ValueError(
            "The prompt does not begin with the tokens that `past_key_values` has seen. Build the next turn from the "
            "returned sequences, or call again without `past_key_values`."
        )
    return whole[:, seen:]


def native_inputs(model, pruned: PrunedInputs) -> dict:
    """What native `generate` gets in place of the caller's prompt: compact, with explicit mask and positions."""
    token_types = pruned.mm_token_type_ids
    if token_types is None:  # zeros say the same, but see to it that a mask is made and not guessed from positions
        token_types = torch.zeros_like(pruned.kept_indices)
    columns = pruned.attention_mask.shape[-1] - pruned.kept_indices.shape[-1]
    inputs = {  # chunks of a prefill are cut out of all three by their place in the cache
        "attention_mask": pruned.attention_mask,
        "position_ids": torch.nn.functional.pad(pruned.position_ids, (columns, 0)),
        "mm_token_type_ids": torch.nn.functional.pad(token_types, (columns, 0)),
    }
    if pruned.input_ids is None:
        return inputs | {"inputs_embeds": model.merge_features(pruned)}
    inputs["input_ids"] = pruned.input_ids
    if pruned.features:
        inputs["mm_encoder_outputs"] = {"video": BaseModelOutputWithPooling(pooler_output=features_of_rows(pruned))}
    return inputs


def features_of_rows(pruned: PrunedInputs) -> list[torch.Tensor]:
    """One entry per row, in the order of its placeholders: beams and samples then repeat whole rows."""
    some = pruned.features[0][1]
    if len(pruned.features) == 1 and pruned.features_per_row is not None:
        return list(some.split(pruned.features_per_row))
    merged = some.new_zeros(*pruned.kept_indices.shape, some.shape[-1])
    for placeholders, features in pruned.features:
        merged = merged.masked_scatter(placeholders[..., None].expand_as(merged), features.to(merged))
    everywhere = torch.stack([placeholders for placeholders, _ in pruned.features]).any(0)
    return [row[places] for row, places in zip(merged, everywhere, strict=True)]


def setting(name: str, kwargs: dict, *generation_configs):
    """What `generate` will go by: the first of the call's arguments, its configuration and the model's to set it."""
    values = [kwargs.get(name), *(getattr(config, name, None) for config in generation_configs)]
    return next((value for value in values if value is not None), None)


def shorten_limits(own_config, generation_config, kwargs: dict, by: int):
    """
    Takes the `by` tokens of the prompt that native `generate` does not see off the limits that count them, wherever
    they were set: in `kwargs`, in the call's `generation_config` (returned, None if there was none) or the model's.
    """
    if generation_config is not None:
        generation_config = copy.deepcopy(generation_config)
    for name in ("max_length", "min_length"):
        if kwargs.get(name) is not None:
            kwargs[name] = max(kwargs[name] - by, 0)
        elif generation_config is not None and getattr(generation_config, name) is not None:
            setattr(generation_config, name, max(getattr(generation_config, name) - by, 0))
        elif getattr(own_config, name) is not None:
            kwargs[name] = max(getattr(own_config, name) - by, 0)
    return generation_config


def remember_prompt(cache, prompt: CachedPrompt | None, answer: torch.Tensor, beams: bool) -> None:
    """
    Notes on a cache that it holds a `prompt` and the `answer` (B * copies, new), for the next turn. After beam search
    the cache's rows are those of beams, so it is marked as one that no prompt fits.
    """
    if prompt is None or cache is None:
        return
    copies = 0 if beams else answer.shape[0] // prompt.kept_indices.shape[0]
    grown = int(cache.get_seq_length()) - prompt.kept_indices.shape[1]
    after = CachedPrompt(
        prompt.kept_indices.repeat_interleave(copies, 0),
        prompt.seen,
        prompt.next_position.repeat_interleave(copies, 0),
    ).extended(grown)
    if prompt.token_ids is not None and copies:
        known = prompt.token_ids.repeat_interleave(copies, 0).to(answer.device)
        after.token_ids = torch.cat([known, answer[:, :grown]], dim=-1)
    cache.pruned_prompt = after
