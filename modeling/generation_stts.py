"""`generate` for a prompt that loses tokens: prune first, generate natively, give the whole prompt back."""

import copy
import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput, GenerationMixin

from .cache_stts import CachedPrompt, mark_cache
from .checks_stts import check_exclusive, check_names
from .plan_stts import VideoFeatures
from .pruning_stts import PrunedInputs, PruningBackbone
from .sequence_stts import KeptSequence, Tokens, any_row_is_packed, token_order
from .settings_stts import check_pruning_ratio


class WholePromptStreamer(BaseStreamer):
    """Passes a stream on, with the caller's prompt in place of the shortened one that native `generate` sends first."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor):
        self.streamer = streamer
        self.prompt: torch.Tensor | None = prompt

    def put(self, value: torch.Tensor) -> None:
        self.streamer.put(value if self.prompt is None else self.prompt)
        self.prompt = None

    def end(self) -> None:
        self.streamer.end()


if TYPE_CHECKING:

    class GenerativeModel(PreTrainedModel, GenerationMixin):
        """The native class that the mixin below precedes."""

else:
    GenerativeModel = GenerationMixin


class STTSGeneration(GenerativeModel):
    """Mixin that goes before the native model with a head; its `model` is a `PruningBackbone`."""

    def prepare_inputs_for_generation(  # type: ignore[override]  # transformers looks for these names, the rest is its
        self, input_ids: torch.LongTensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers. Each row holds one sample, whatever the positions of its padding look like."""
        native: Any = super()  # whose methods are declared for a protocol of transformers
        inputs = native.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return inputs | {"packed_rows": False}

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """As in transformers, of text alone, since it takes no pixels. Raises `ValueError` for placeholders of them."""
        model = cast(PruningBackbone, self.get_submodule("model"))
        for index, ids in enumerate(inputs):
            found = model.find_placeholders(Tokens(torch.tensor([ids])), True, True)
            if any(bool(places.any()) for places in found):
                raise ValueError(
                    f"`inputs[{index}]` has placeholders of a video or image, whose pixels `generate_batch` does not "
                    "take: call `generate` with all that the processor returns."
                )
        native: Any = super()
        return native.generate_batch(inputs, *args, **kwargs)

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        pruning_ratio: float | None = None,
        **kwargs: Any,
    ) -> GenerateOutput | torch.LongTensor:
        """
        As transformers' `generate`, with every decoding method it has; returns the caller's whole prompt, then the new
        tokens. `pruning_ratio` replaces the config's for this call (a `generation_config` may hold it too);
        `max_length` and `min_length` count the whole prompt. `past_key_values` of an earlier call may be reused with a
        longer prompt: leave out the videos that it has already seen. With `return_dict_in_generate=True` the result
        also has `keep_mask` and `token_scores` (per video (T, n), None without) and `kept_indices` (B, L') of the
        prompt. Raises `ValueError` where cache and prompt do not belong together.
        """

        native: Any = super()
        placed = name_arguments(args)
        kwargs = placed | check_names(kwargs, placed)

        def setting(name: str) -> Any:
            return resolve_setting(name, kwargs, generation_config, self.generation_config)

        ratio = setting("pruning_ratio") if pruning_ratio is None else pruning_ratio
        if ratio is not None:
            check_pruning_ratio(ratio)
        if kwargs.pop("pruned_length", None) is not None:
            raise ValueError("`pruned_length` is for training with `forward`; leave it out of `generate`.")
        model = cast(PruningBackbone, self.get_submodule("model"))
        cache: Cache | None = kwargs.get("past_key_values")
        cached = CachedPrompt.of(cache)
        given = [name for name, value in kwargs.items() if value is not None]
        if not model.goes_through(given) and cached is None:
            order = token_order(kwargs.get("position_ids"), model.num_axes)
            check_one_sample(order, kwargs.get("attention_mask"), cache)
            prompts = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            prompt = next((prompt for prompt in prompts if prompt is not None), None)
            output = native.generate(inputs, generation_config, **kwargs)
            mark_cache(cache if isinstance(output, torch.Tensor) else output.get("past_key_values"), skips_padding=True)
            if prompt is None:
                return with_what_was_kept(output, None)
            whole_prompt = KeptSequence.whole(prompt.shape[0], prompt.shape[1], prompt.device)
            return with_what_was_kept(output, whole_prompt.kept_indices)
        if cache is not None and setting("use_cache") is False:
            raise ValueError("`use_cache=False` came with `past_key_values` to be used; leave out one of them.")
        model.check_generation(cache, setting)
        whole_ids = cached is None or not check_assistance(kwargs, setting("prompt_lookup_num_tokens"))
        if inputs is not None and kwargs.setdefault("input_ids", inputs) is not inputs:
            raise ValueError("`inputs` and `input_ids` are both given; pass the prompt once.")
        whole, new = read_prompt(
            kwargs, cached, cache, setting("pad_token_id"), setting("eos_token_id"), model.num_axes
        )
        limit = setting("max_length")
        if limit is not None and setting("max_new_tokens") is None and limit <= whole.shape[1]:
            raise ValueError(
                f"`max_length` is {limit}, but the prompt alone has {whole.shape[1]} tokens, dropped ones included. "
                "Raise it, or pass `max_new_tokens`."
            )
        prompt = whole.input_ids
        vision = model.take_vision_inputs(kwargs)
        check_exclusive(kwargs, not vision.keys().isdisjoint(model.pixels))
        mask = new.attention_mask
        pads_left = isinstance(mask, torch.Tensor) and not bool(mask[:, -1].all())  # the answer follows the last column
        pruned = model.prune(new, vision, cache, ratio, pads_left=pads_left)
        kwargs.update(native_inputs(model, pruned, whole_ids))
        length = (kwargs["input_ids"] if prompt is not None else pruned.kept_indices).shape[1]
        limits = shorten_limits(self.generation_config, generation_config, kwargs, whole.shape[1] - length)
        chunk_size, types = setting("prefill_chunk_size"), pruned.tokens.mm_token_type_ids
        if chunk_size is not None and types is not None and not model.vision_is_causal:
            # Vision tokens attend to each other in both directions, so no chunk may end between them.
            kwargs["prefill_chunk_size"] = max(chunk_size, *types.any(0).nonzero()[-1:, 0].add(1).tolist(), 1)
        if kwargs.get("streamer") is not None and prompt is not None:
            kwargs["streamer"] = WholePromptStreamer(kwargs["streamer"], prompt.cpu())
        with CachedPrompt.set_aside(cache, pruned.cached_after):
            output = native.generate(None, limits, **kwargs)
        sequences = answer = output if isinstance(output, torch.Tensor) else output.sequences
        if prompt is not None:
            answer = sequences[:, length:]
            copies = sequences.shape[0] // prompt.shape[0]
            sequences = torch.cat([prompt.repeat_interleave(copies, 0).to(answer.device), answer], dim=-1)
        held = cache if isinstance(output, torch.Tensor) else output.get("past_key_values")
        mark_cache(held, bool(pruned.features), skips_padding=True)
        if pruned.cached_after is not None and held is not None:
            beams = (setting("num_beams") or 1) > 1
            note_answer(pruned.cached_after, held, answer, beams).attach(held)
        if isinstance(output, torch.Tensor):
            return cast(torch.LongTensor, sequences)
        output.sequences = sequences
        return with_what_was_kept(output, pruned.kept_indices, pruned.video)


def name_arguments(args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of `generate` behind `inputs` and `generation_config`, by their names."""
    found = inspect.signature(GenerationMixin.generate).bind_partial(None, None, None, *args).arguments
    return dict(list(found.items())[3:])


def with_what_was_kept(output: Any, kept_indices: torch.Tensor | None, video: VideoFeatures | None = None) -> Any:
    """The output with the fields of pruning, where it has fields. kept_indices: (B, L')."""
    if not isinstance(output, torch.Tensor):
        output["kept_indices"] = kept_indices
        for name in ("keep_mask", "token_scores"):
            output[name] = getattr(video, name, None)
    return output


def read_prompt(
    kwargs: dict[str, Any],
    cached: CachedPrompt | None,
    cache: Cache | None,
    pad_token_id: Any,
    eos_token_id: Any,
    num_axes: int,
) -> tuple[Tokens, Tokens]:
    """
    Takes the prompt out of `generate`'s arguments: the whole of it (B, L), and the part that the cache has not seen,
    with the whole mask. Raises `ValueError` for what no row of one text can be.
    """
    whole = Tokens(kwargs.pop("input_ids", None), kwargs.pop("inputs_embeds", None))
    batch_size, length = whole.shape
    mask = kwargs.get("attention_mask")
    if mask is None and whole.input_ids is not None:
        mask = infer_mask(whole.input_ids, pad_token_id, eos_token_id)
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"`attention_mask` has {mask.dim()} dimensions, but `generate` needs the 2D padding mask.")
    positions = kwargs.get("position_ids")
    order = token_order(positions, num_axes)
    if order is not None and order.shape[-1] == length:
        check_one_sample(order.expand(batch_size, length), mask)
    if positions is None and mask is not None and cached is None:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    if cached is not None:
        cached.check_usable()
    start = count_seen(whole, mask, cached, cache)
    types = kwargs.get("mm_token_type_ids")
    if types is not None and types.shape[-1] < length:  # an earlier turn's: what came since is text
        types = torch.nn.functional.pad(types, (0, length - types.shape[-1]))
    new = Tokens(
        None if whole.input_ids is None else whole.input_ids[:, start:],
        None if whole.inputs_embeds is None else whole.inputs_embeds[:, start:],
        mask,
        None if positions is None else positions[..., start - length :],
        types,
    )
    return whole, new


def infer_mask(
    prompt: torch.Tensor, pad_token_id: int | None, eos_token_id: int | list[int] | None
) -> torch.Tensor | None:
    """As transformers does without a mask: hides padding in (B, L), unless padding may also be the end of a text."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if pad_token_id is None or pad_token_id in ends or not (prompt == pad_token_id).any():
        return None
    return (prompt != pad_token_id).long()


def check_one_sample(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, cache: Cache | None = None
) -> None:
    """Raises `ValueError` for rows (B, L) whose positions start over: `generate` cannot continue a packed row."""
    if position_ids is None or (cache is not None and cache.get_seq_length()):
        return
    fits = attention_mask is not None and attention_mask.shape == position_ids.shape
    if any_row_is_packed(position_ids, attention_mask if fits else None):
        raise ValueError(
            "`position_ids` start over, as for several samples in a row, but `generate` continues one text per row. "
            "Pass the samples as rows of their own, or leave out `position_ids`."
        )


def count_seen(
    whole: Tokens, attention_mask: torch.Tensor | None, cached: CachedPrompt | None, cache: Cache | None
) -> int:
    """
    How many tokens of a prompt (B, L) a cache has seen. As in transformers, a mask longer than the prompt says that the
    prompt is only the rest. Raises `ValueError` for a prompt that does not begin as the cache does, or ends there.
    """
    length = whole.shape[1]
    seen = cached.seen if cached is not None else (int(cache.get_seq_length()) if cache is not None else 0)
    if not seen or (attention_mask is not None and attention_mask.shape[-1] == seen + length):
        return 0
    if length <= seen:
        raise ValueError(
            f"The prompt has {length} tokens, but `past_key_values` has already seen {seen}. Pass the whole "
            "conversation, dropped video tokens included, with at least one new token."
        )
    known, given = cached.token_ids if cached is not None else None, whole.input_ids
    if known is not None and given is not None and not torch.equal(known.to(given.device), given[:, :seen]):
        raise ValueError(
            "The prompt does not begin with the tokens that `past_key_values` has seen. Build the next turn from the "
            "returned sequences, or call again without `past_key_values`."
        )
    return seen


def check_assistance(kwargs: dict[str, Any], lookup: int | None) -> bool:
    """
    Whether a call with a cache that holds a pruned video looks candidates up in its prompt. Raises `ValueError` for
    what transformers' assisted decoding cannot do there: positions for an assistant, and a mask that hides something.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("assistant_model") is not None or (lookup and mask is not None and not bool(mask.bool().all())):
        name = "assistant_model" if kwargs.get("assistant_model") is not None else "prompt_lookup_num_tokens"
        raise ValueError(
            f"`{name}` came with `past_key_values` that hold a pruned video"
            f"{'' if name == 'assistant_model' else ' and an `attention_mask` that hides padding'}, where transformers "
            "cannot decode with candidates. Leave out one of them."
        )
    return bool(lookup)


def native_inputs(model: PruningBackbone, pruned: PrunedInputs, whole_ids: bool) -> dict[str, Any]:
    """
    What native `generate` gets in place of the caller's prompt: compact, with explicit mask and positions. whole_ids:
    with the ids of cached columns before them, which processors of logits look at.
    """
    tokens = pruned.tokens
    assert isinstance(tokens.attention_mask, torch.Tensor)  # `prune` makes both
    assert tokens.position_ids is not None
    types = tokens.mm_token_type_ids
    if types is None:  # zeros mean the same, and make transformers build a mask instead of guessing from positions
        types = torch.zeros_like(pruned.kept_indices)
    columns = tokens.attention_mask.shape[-1] - pruned.kept_indices.shape[-1]
    inputs: dict[str, Any] = {  # chunks of a prefill are cut out of all three by their place in the cache
        "attention_mask": tokens.attention_mask,
        "position_ids": torch.nn.functional.pad(tokens.position_ids, (columns, 0)),
        "mm_token_type_ids": torch.nn.functional.pad(types, (columns, 0)),
    }
    if tokens.input_ids is not None:
        past = tokens.input_ids.new_zeros(tokens.input_ids.shape[0], columns if whole_ids else 0)
        note = pruned.cached_after
        if past.shape[1] and note is not None and note.token_ids is not None:
            places = note.kept_indices[:, :columns]
            past = note.token_ids.to(past.device).gather(-1, places.clamp_min(0)).masked_fill(places < 0, 0)
        inputs["input_ids"] = torch.cat([past, tokens.input_ids], dim=-1)
    inputs |= model.merge_inputs(pruned, by_row=True)
    if tokens.inputs_embeds is not None:
        embeds = inputs.get("inputs_embeds", tokens.inputs_embeds)
        inputs["inputs_embeds"] = torch.nn.functional.pad(embeds, (0, 0, columns, 0))
    return inputs


def resolve_setting(name: str, kwargs: dict[str, Any], *generation_configs: GenerationConfig | None) -> Any:
    """What `generate` will go by: the first of the call's arguments, its configuration and the model's to set it."""
    values = [kwargs.get(name), *(getattr(config, name, None) for config in generation_configs)]
    return next((value for value in values if value is not None), None)


def shorten_limits(
    own_config: GenerationConfig | None, config: GenerationConfig | None, kwargs: dict[str, Any], by: int
) -> GenerationConfig | None:
    """
    Takes the `by` tokens of the prompt that native `generate` does not see off the limits that count them, wherever
    they were set: in `kwargs`, in the call's configuration (returned, None if there was none) or the model's.
    """
    config = copy.deepcopy(config)
    for name in ("max_length", "min_length"):
        if kwargs.get(name) is not None:
            kwargs[name] = max(kwargs[name] - by, 0)
        elif config is not None and getattr(config, name) is not None:
            setattr(config, name, max(getattr(config, name) - by, 0))
        elif getattr(own_config, name) is not None:
            kwargs[name] = max(getattr(own_config, name) - by, 0)
    return config


def note_answer(prompt: CachedPrompt, cache: Cache, answer: torch.Tensor, beams: bool) -> CachedPrompt:
    """What a cache holds after a `prompt` and its `answer` (B * copies, new), for the next turn."""
    after = prompt.repeat(answer.shape[0] // prompt.kept_indices.shape[0])
    if beams:
        after.unusable = "after beam search its rows are those of beams, which are not the returned sequences."
    grown = int(cache.get_seq_length()) - prompt.kept_indices.shape[1]
    return after.extended(grown, answer[:, :grown])
