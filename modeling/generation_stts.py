"""`generate` for a prompt that loses tokens: prune first, generate natively, give the whole prompt back."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput, GenerationMixin

from .budget_stts import KEEP_ARGUMENTS
from .cache_stts import UNKNOWN, CacheRecord
from .plan_stts import VideoFeatures
from .pruning_stts import Call, PrunedInputs, PruningBackbone
from .sequence_stts import KeptSequence, Tokens, holds_packed_rows
from .settings_stts import PRUNING_FIELDS, RANKING_ARGUMENTS, TRAINING_FIELDS, check_names, take_given


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


class STTSGeneration(PreTrainedModel, GenerationMixin):
    """Mixin that goes before the native model with a head."""

    model: PruningBackbone

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Settings of `from_pretrained` are the config's, and take the place of saved ones here."""
        given = take_given(kwargs, {*PRUNING_FIELDS, *TRAINING_FIELDS})
        native: Any = super()
        native.adjust_generation_fn(*args, **kwargs)
        replaced = KEEP_ARGUMENTS if "pruning_ratio" in given else {"pruning_ratio", *given}
        for name in replaced if given.keys() & {*KEEP_ARGUMENTS} else ():
            vars(self.generation_config).pop(name, None)

    def prepare_inputs_for_generation(  # type: ignore[override]  # transformers looks for these names, the rest is its
        self, input_ids: torch.LongTensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers. A row holds one sample, whatever the positions of its padding; `generate` records."""
        native: Any = super()  # whose methods are declared for a protocol of transformers
        inputs = native.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return inputs | {"packed_rows": False, "records_cache": False}

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """As in transformers, of text alone, since it takes no pixels. Raises `ValueError` for placeholders of them."""
        for index, ids in enumerate(inputs):
            vision = (*self.model.video_inputs, *self.model.image_inputs)
            if any(bool(found.any()) for found in self.model.find_placeholders(torch.tensor([ids]), vision)):
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
        **kwargs: Any,
    ) -> GenerateOutput | torch.LongTensor:
        """
        As transformers' `generate`, with every decoding method it has; returns the caller's whole prompt, then the new
        tokens. `pruning_ratio`, or `score_threshold` and what goes with it, replaces the config's for this call (a
        `generation_config` may hold it too); `block_scores` and `tower_cache` are those of `forward`. `max_length` and
        `min_length` count the whole prompt. `past_key_values` of an earlier call may be reused with a longer prompt:
        leave out the videos that it has already seen. With `return_dict_in_generate=True` the result also has
        `keep_mask` and `token_scores` (per video (T, n), None without) and `kept_indices` (B, L') of the prompt. Raises
        `ValueError` where cache and prompt do not belong together.
        """
        native: Any = super()
        check_names(kwargs)
        kwargs = name_arguments(args, kwargs)
        check_generation_configs(self.generation_config, generation_config)

        def setting(name: str) -> Any:
            return resolve_setting(name, kwargs, generation_config, self.generation_config)

        given = {name: kwargs.pop(name, None) for name in RANKING_ARGUMENTS}
        configs = [vars(one) for one in (self.generation_config, generation_config) if one is not None]
        keep = self.config.keep_rule(*configs, take_given(kwargs, KEEP_ARGUMENTS))
        if kwargs.pop("pruned_length", None) is not None:
            raise ValueError("`pruned_length` is for training with `forward`; leave it out of `generate`.")
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name != "input_ids"}
        if inputs is not None and kwargs.setdefault("input_ids", inputs) is not inputs:
            raise ValueError("`inputs` and `input_ids` are both given; pass the prompt once.")
        cache, vision = kwargs.get("past_key_values"), self.model.take_vision_inputs(kwargs)
        record = CacheRecord.usable(cache)
        self.model.check_new_vision(cache, vision)
        cached = None if record is None or record.whole else record
        if record is not None and record.whole and kwargs.get("input_ids") is not None:
            count_seen(kwargs["input_ids"], kwargs.get("attention_mask"), record, cache)
        if cached is None and not self.model.needs_pruning(vision) and not (record is not None and pads_right(kwargs)):
            return self.generate_natively(record, kwargs | vision, generation_config)
        whole_ids = check_options(self.model, cache, cached, kwargs, setting)
        prompt, call = read_prompt(self.model, kwargs, cached, setting)
        pruned = self.model.prune(replace(call, vision=vision, keep=keep, **given))
        kwargs |= native_inputs(self.model, pruned, whole_ids, setting)
        length = kwargs["input_ids"].shape[1]
        shorten_limits(kwargs, setting, prompt.shape[1] - length)
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = WholePromptStreamer(kwargs["streamer"], prompt.cpu())
        with CacheRecord.set_aside(cache, pruned.record):
            output = native.generate(None, generation_config, **kwargs)
        answer = (output if isinstance(output, torch.Tensor) else output.sequences)[:, length:]
        record_answer(pruned.record, cache_of(output, cache), answer, (setting("num_beams") or 1) > 1)
        prompts = prompt.repeat_interleave(len(answer) // len(prompt), 0).to(answer.device)
        sequences = torch.cat([prompts, answer], dim=-1)
        if isinstance(output, torch.Tensor):
            return cast(torch.LongTensor, sequences)
        output.sequences = sequences
        return with_what_was_kept(output, pruned.kept_indices, pruned.video)

    def generate_natively(
        self, record: CacheRecord | None, kwargs: dict[str, Any], generation_config: GenerationConfig | None
    ) -> GenerateOutput | torch.LongTensor:
        """Native `generate` on the caller's prompt. record: of the caller's cache."""
        native: Any = super()
        cache = kwargs.get("past_key_values")
        kept_indices = check_one_sample(kwargs, self.model.num_axes)
        with CacheRecord.set_aside(cache):
            output = native.generate(None, generation_config, **kwargs)
        cache = cache_of(output, cache)
        if cache is not None:
            rows = output if isinstance(output, torch.Tensor) else output.sequences
            past, columns = rows[:, :0] if record is None else record.token_ids, int(cache.get_seq_length())
            missing = max(columns + 1 - rows.shape[1], 0)  # the last token is in no column
            past = torch.nn.functional.pad(past, (0, missing - past.shape[1]), value=UNKNOWN)
            ids = torch.cat([past.repeat_interleave(len(rows) // len(past), 0), rows], dim=-1)[:, :columns]
            after = CacheRecord.of_columns(ids, skips_hidden=True)
            CacheRecord.attach(cache, after)
        return with_what_was_kept(output, kept_indices)


def pads_right(kwargs: dict[str, Any]) -> bool:
    """Whether a row of a prompt ends in padding, where the answer would begin."""
    mask = kwargs.get("attention_mask")
    return mask is not None and not bool(mask[:, -1].all())


def name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` behind `inputs` and `generation_config`, by their names, each of which is given once."""
    found = inspect.signature(GenerationMixin.generate).bind_partial(None, None, None, *args, **kwargs).arguments
    others = found.pop("kwargs", {})
    return dict(list(found.items())[3:]) | others


def check_generation_configs(own: GenerationConfig, given: GenerationConfig | None) -> None:
    """
    Raises `ValueError` for near misses of our arguments in configs, which take any name. A model's own may hold fields
    of our configs.
    """
    names = vars(own).keys() - {*PRUNING_FIELDS, *TRAINING_FIELDS} if given is None else vars(given).keys() - vars(own)
    check_names(names - vars(GenerationConfig()).keys())


def cache_of(output: Any, cache: Cache | None) -> Cache | None:
    """The cache that native `generate` filled: the output's, where it has fields, else the caller's."""
    return cache if isinstance(output, torch.Tensor) else output.get("past_key_values")


def with_what_was_kept(output: Any, kept_indices: torch.Tensor | None, video: VideoFeatures | None = None) -> Any:
    """The output with the fields of pruning, where it has fields. kept_indices: (B, L')."""
    if not isinstance(output, torch.Tensor):
        output["kept_indices"] = kept_indices
        for name in ("keep_mask", "token_scores"):
            output[name] = getattr(video, name, None)
    return output


def check_options(
    model: PruningBackbone,
    cache: Cache | None,
    cached: CacheRecord | None,
    kwargs: dict[str, Any],
    setting: Callable[[str], Any],
) -> bool:
    """
    Whether native `generate` gets the ids of cached columns too, for processors of logits. Raises `ValueError` for
    options that fit neither each other nor pruning; of assisted decoding over a pruned video, transformers lacks
    positions for an assistant, and a mask that hides something.
    """
    if cache is not None and setting("use_cache") is False:
        raise ValueError("`use_cache=False` and `past_key_values` exclude each other; leave out one of them.")
    model.check_generation(cache, setting)
    if cached is None:
        return True
    mask, lookup = kwargs.get("attention_mask"), setting("prompt_lookup_num_tokens")
    if kwargs.get("assistant_model") is not None or (lookup and mask is not None and not bool(mask.bool().all())):
        name = "assistant_model" if kwargs.get("assistant_model") is not None else "prompt_lookup_num_tokens"
        raise ValueError(
            f"`{name}` came with `past_key_values` that hold a pruned video"
            f"{'' if name == 'assistant_model' else ' and an `attention_mask` that hides padding'}, where transformers "
            "cannot decode with candidates. Leave out one of them."
        )
    return not lookup


def read_prompt(
    model: PruningBackbone, kwargs: dict[str, Any], cached: CacheRecord | None, setting: Callable[[str], Any]
) -> tuple[torch.Tensor, Call]:
    """
    The prompt in `generate`'s arguments: the ids of the whole of it (B, L), and the call for the part that the cache
    has not seen, with the whole mask. Raises `ValueError` for what no row of one text can be.
    """
    whole = Tokens(kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    ids, cache, (_, length) = whole.ids, kwargs.get("past_key_values"), whole.shape
    limit = setting("max_length")
    if limit is not None and setting("max_new_tokens") is None and limit <= length:
        raise ValueError(
            f"`max_length` is {limit}, but the prompt alone has {length} tokens, dropped ones included. "
            "Raise it, or pass `max_new_tokens`."
        )
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = infer_mask(ids, setting("pad_token_id"), setting("eos_token_id"))
    mask, positions, types = (kwargs.get(name) for name in ("attention_mask", "position_ids", "mm_token_type_ids"))
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"`attention_mask` has {mask.dim()} dimensions. Pass the padding mask, (batch, length).")
    check_one_sample(kwargs, model.num_axes)
    if positions is None and mask is not None and cached is None:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    start = count_seen(ids, mask, cached, cache)
    if types is not None and types.shape[-1] < length:  # an earlier turn's: what came since is text
        types = torch.nn.functional.pad(types, (0, length - types.shape[-1]))
    new = Tokens(ids[:, start:], None, mask, None if positions is None else positions[..., start - length :], types)
    model.check_exclusive(kwargs)
    return ids, Call(new, cache=cache, pads_left=pads_right(kwargs))


def infer_mask(
    prompt: torch.Tensor, pad_token_id: int | None, eos_token_id: int | list[int] | None
) -> torch.Tensor | None:
    """As transformers does without a mask: hides padding in (B, L), unless padding may also be the end of a text."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if pad_token_id is None or pad_token_id in ends or not (prompt == pad_token_id).any():
        return None
    return (prompt != pad_token_id).long()


def check_one_sample(kwargs: dict[str, Any], num_axes: int) -> torch.Tensor | None:
    """
    Places (B, L) of the prompt's tokens, where there is a prompt. Raises `ValueError` for rows whose positions start
    over: `generate` cannot continue a packed row.
    """
    prompt = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if prompt is None:
        return None
    ids, mask = prompt[..., 0] if prompt.dim() == 3 else prompt, kwargs.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        mask = None
    if holds_packed_rows(Tokens(ids, None, mask, kwargs.get("position_ids")), None, num_axes):
        raise ValueError(
            "`position_ids` start over, so rows are packed, but `generate` continues one sample per row. "
            "Pass each sample as its own row, or leave out `position_ids`."
        )
    return KeptSequence.whole(ids.shape[0], ids.shape[1], ids.device).kept_indices


def count_seen(
    whole: torch.Tensor, attention_mask: torch.Tensor | None, cached: CacheRecord | None, cache: Cache | None
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
    if cached is not None and not cached.matches(whole):
        raise ValueError(
            "The prompt does not begin with the tokens that `past_key_values` has seen. Build the next turn from the "
            "returned sequences, or call again without `past_key_values`."
        )
    return seen


def native_inputs(
    model: PruningBackbone, pruned: PrunedInputs, whole_ids: bool, setting: Callable[[str], Any]
) -> dict[str, Any]:
    """
    What native `generate` gets in place of the caller's prompt: compact, with explicit mask and positions. whole_ids:
    with the ids of cached columns before them, which processors of logits look at.
    """
    tokens, types = pruned.tokens, pruned.tokens.mm_token_type_ids
    # `prune` makes all three
    assert tokens.input_ids is not None
    assert isinstance(tokens.attention_mask, torch.Tensor)
    assert tokens.position_ids is not None
    if types is None:  # zeros mean the same, and make transformers build a mask instead of guessing from positions
        types = torch.zeros_like(pruned.kept_indices)
    columns = tokens.attention_mask.shape[-1] - pruned.kept_indices.shape[-1]
    past = pruned.record.token_ids[:, : columns if whole_ids else 0].clamp_min(0)
    return {  # chunks of a prefill are cut out of these by their place in the cache
        "input_ids": torch.cat([past, tokens.input_ids], dim=-1),
        "attention_mask": tokens.attention_mask,
        "position_ids": torch.nn.functional.pad(tokens.position_ids, (columns, 0)),
        "mm_token_type_ids": torch.nn.functional.pad(types, (columns, 0)),
    } | model.merge_rows(pruned, setting)


def resolve_setting(name: str, kwargs: dict[str, Any], *generation_configs: GenerationConfig | None) -> Any:
    """What `generate` will go by: the first of the call's arguments, its configuration and the model's to set it."""
    values = [kwargs.get(name), *(getattr(config, name, None) for config in generation_configs)]
    return next((value for value in values if value is not None), None)


def shorten_limits(kwargs: dict[str, Any], setting: Callable[[str], Any], by: int) -> None:
    """
    Takes the `by` tokens of the prompt that native `generate` does not see off the limits that count them, wherever
    they were set; `kwargs` outweigh the configurations.
    """
    for name in ("max_length", "min_length"):
        if setting(name) is not None:
            kwargs[name] = max(setting(name) - by, 0)


def record_answer(record: CacheRecord, cache: Cache | None, answer: torch.Tensor, beams: bool) -> None:
    """Attaches to a cache the record of a prompt, `record`, and its answer (B * copies, new)."""
    if cache is None:
        return
    record.batch_repeat_interleave(len(answer) // len(record.positions))
    grown = int(cache.get_seq_length()) - record.columns
    record = record.answered(grown, answer[:, :grown])
    if beams and not record.whole:
        record.unusable = "after beam search its rows are those of beams, which are not the returned sequences."
    CacheRecord.attach(cache, record)
