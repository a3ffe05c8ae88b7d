"""From prepared inputs to answers: one call of `generate`, or heads that are read once and reused for each tail."""

import copy
import dataclasses
import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache

from stts_hf.data.collator import join_vision
from stts_hf.data.encoding import Processor
from stts_hf.model_parts import find_backbone
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.modeling.cache_stts import CacheRecord
from stts_hf.modeling.generation_stts import resolve_setting
from stts_hf.video.processors import OF_VIDEOS, block_grids
from stts_hf.wording import did_you_mean

from .requests import Answer, Prepared, prepare

MAX_NEW_TOKENS = 256
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")
_LENGTHS = ("max_new_tokens", "min_new_tokens", "max_length", "min_length")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def generate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """
    `given`, completed to the greedy answer of at most 256 tokens: sampling parameters turn sampling on, and a
    `generation_config` replaces these defaults. Raises `ValueError` for an option that `generate` does not take from a
    caller, and `TypeError` for a length that is not a whole number.
    """
    options = dict(given)
    config = options.get("generation_config")
    of_call = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "inputs", "kwargs"}
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | of_call
    for name in given.keys() - known - {*KEEP_ARGUMENTS}:
        advice = did_you_mean(name, known | {*KEEP_ARGUMENTS, "processing"}, "Leave it out.")
        if name in OF_VIDEOS:
            advice = f"It is an option of videos: pass processing={{{name!r}: {given[name]!r}}} with the video."
        if name == "selector":
            advice = "It is the model's: pass it to `stts_hf.load`."
        if name == "processing":
            advice = "It is the video's: pass it to `watch` or `answer`."
        raise ValueError(f"{name} is {given[name]!r}, but `generate` has no such option. {advice}")
    for name in _LENGTHS:
        if (length := given.get(name)) is not None and (isinstance(length, bool) or not isinstance(length, int)):
            raise TypeError(f"{name} must be a whole number of tokens, got {length!r}.")
    check_one_answer(options)
    for name in KEEP_ARGUMENTS:
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"generation_config has {name}={value!r}. Pass {name} to `answer` or `watch`.")
    if config is None:
        options.setdefault("do_sample", any(given.get(name) is not None for name in _SAMPLING))
        if given.get("max_length") is None:
            options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return options


def check_one_answer(options: dict[str, Any]) -> None:
    """Raises `ValueError` for options of `generate` that ask for several answers to a prompt."""
    number = resolve_setting("num_return_sequences", options, options.get("generation_config"))
    if number not in (None, 1):
        raise ValueError(f"num_return_sequences is {number!r}, but a question gets one answer. Leave it out.")


def num_beams(model: Any, options: dict[str, Any]) -> int:
    """Beams that `generate` would search with. It copies caches for them, so it cannot start from a read head."""
    return resolve_setting("num_beams", options, options.get("generation_config"), model.generation_config) or 1


def answer_prepared(
    model: Any, processor: Processor, prepared: Sequence[Prepared], *, started: float | None = None, **options: Any
) -> list[Answer]:
    """Answers whole prompts in one call of `generate`, which takes the options. started: by `time.perf_counter`."""
    started = time.perf_counter() if started is None else started
    inputs = inputs_for(model, join_prompts(processor, [one.inputs for one in prepared]))
    options |= {"return_dict_in_generate": True, "tokenizer": processor.tokenizer}  # which `stop_strings` needs
    output = model.generate(**inputs, **options)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    return complete(model, processor, with_masks(prepared, output), new, started)


@torch.no_grad()
def score_blocks(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Scores (T, n) of the videos in a processor's output. At `k = 1` the tower ends where it has scored."""
    (_, backbone), moved = find_backbone(model), inputs_for(model, inputs)
    videos = {name: moved[name] for name in backbone.video_inputs if name in moved}
    scores: tuple[torch.Tensor, ...] = backbone.get_video_features(**videos, pruning_ratio=1.0).token_scores
    return scores


def fill_budget(model: Any, processor: Processor, processing: Mapping[str, Any] | None, prepared: Prepared) -> Prepared:
    """
    Test-time scaling towards a budget: the request read again with 2, 4, 8, 16 times as many frames, as long as fewer
    blocks than its budget reach the threshold and its videos have more frames. Other requests stay as they are.
    """
    rule = prepared.request.rule
    if rule is None or rule.threshold is None or not isinstance(rule.budget, int) or not prepared.scales:
        return prepared
    for factor in (2, 4, 8, 16):
        above = [int((scores[1:] >= rule.threshold).sum()) for scores in score_blocks(model, prepared.inputs)]
        kept = dataclasses.replace(rule, budget=None).num_kept(block_grids(processor, prepared.inputs), above)
        if sum(kept) >= rule.budget:
            break
        more = prepare(processor, processing, prepared.request, pruning_ratio=1 - 1 / factor)
        if more.begun.prompt_tokens <= prepared.begun.prompt_tokens:
            break
        prepared = more
    return prepared


@dataclass
class ReadHeads:
    """
    Heads of prompts that the model has read, which any number of tails can follow.

    tokens: `input_ids`, `attention_mask` and, where there are some, `mm_token_type_ids` of the heads (H, tokens).
    cache: after the heads; recurrent layers, which cannot be cut back, are kept beside it as they were. begun: answers
    without text.
    """

    tokens: dict[str, torch.Tensor]
    cache: Cache
    begun: list[Answer]

    def __post_init__(self) -> None:
        self.columns, self.record = int(self.cache.get_seq_length()), copy.copy(CacheRecord.of(self.cache))
        self.states = [copy.deepcopy(layer) for layer in self.cache.layers if is_recurrent(layer)]

    @property
    def num_bytes(self) -> int:
        """Memory of the cache and of the states kept beside it, including what an interrupted answer left there."""
        tensors = [tensor for layer in (*self.cache.layers, *self.states) for tensor in tensors_of(layer)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def take(self, rows: torch.Tensor, keep: bool) -> Cache:
        """A cache with a copy of the heads `rows` (B,). keep: whether `self.cache` is needed again."""
        cache = self.cache
        if keep:
            cache = copy.copy(cache)
            cache.layers = [copy_layer(layer) for layer in self.cache.layers]
        cache.reorder_cache(cast(torch.LongTensor, rows))  # on the host, since layers may be on several devices
        return cache

    def rewind(self) -> None:
        """Cuts the cache back to the heads; an interrupted call may have left layers of different lengths."""
        states = iter(self.states)
        layers: list[Any] = [copy.deepcopy(next(states)) if is_recurrent(of) else of for of in self.cache.layers]
        for layer in layers:
            if not is_recurrent(layer):
                layer.keys, layer.values = (of[..., : self.columns, :] for of in (layer.keys, layer.values))
        self.cache.layers = layers
        CacheRecord.attach(self.cache, copy.copy(self.record))

    def answer(
        self, model: Any, cache: Cache, rows: torch.Tensor, tails: Mapping[str, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """
        Returns the new tokens (B, new) after tails. cache: of the heads `rows` (B,). tails: their tokens, padded on the
        left. options: of `model.generate`.
        """
        prompts = {}
        for name, head in self.tokens.items():
            tail = tails[name] if name in tails else torch.zeros_like(tails["input_ids"])
            prompts[name] = torch.cat([head[rows], tail.to(head.device)], dim=-1)
        options |= {"return_dict_in_generate": True}
        output = model.generate(**prompts, past_key_values=cache, **options)
        return cast(torch.Tensor, output.sequences[:, prompts["input_ids"].shape[1] :])


def is_recurrent(layer: Any) -> bool:
    """Whether a cache's layer keeps a state in place of keys and values."""
    return hasattr(layer, "recurrent_states")


def copy_layer(layer: Any) -> Any:
    """A copy of a cache's layer that shares its tensors, but not the dicts that hold a recurrent layer's."""
    copied = copy.copy(layer)
    vars(copied).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return copied


def tensors_of(layer: Any) -> list[torch.Tensor]:
    if is_recurrent(layer):
        return [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [layer.keys, layer.values]


@torch.no_grad()
def read_heads(model: Any, processor: Processor, prepared: Sequence[Prepared], **keep: Any) -> ReadHeads:
    """Runs the model over heads, whose requests have no tail. keep: how many blocks stay."""
    moved = inputs_for(model, join_prompts(processor, [one.inputs for one in prepared], "right"))
    output = model(**moved, **keep, use_cache=True, logits_to_keep=1)
    tokens = {name: moved[name] for name in _PER_TOKEN if name in moved}
    return ReadHeads(tokens, output.past_key_values, with_masks(prepared, output))


def answer_tails(
    model: Any,
    processor: Processor,
    heads: ReadHeads,
    asked: Sequence[tuple[int, Answer, str]],
    batch_size: int,
    *,
    started: float,
    keep: bool = False,
    **options: Any,
) -> list[Answer]:
    """
    Answers tails, at most `batch_size` at once.

    asked: of each tail the row of its head, the head's answer, and the text. started: when the work began, by
    `time.perf_counter`. keep: whether the heads are needed again.
    """
    new: dict[int, torch.Tensor] = {}
    options["tokenizer"] = processor.tokenizer
    tokens = [tokenize(processor, tail) for *_, tail in asked]
    lengths = [tail["input_ids"].shape[1] for tail in tokens]
    batches = batches_of(lengths, batch_size, of_one_length=bool(heads.states))
    for number, batch in enumerate(batches, 1):
        rows = torch.tensor([asked[index][0] for index in batch])
        in_place = keep and len(asked) == 1  # the caller rewinds
        cache = heads.cache if in_place else heads.take(rows, keep or number < len(batches))
        tails = join_prompts(processor, [tokens[index] for index in batch])
        new |= zip(batch, heads.answer(model, cache, rows, tails, **options), strict=True)
    begun = [
        dataclasses.replace(answer, prompt_tokens=answer.prompt_tokens + length)
        for (_, answer, _), length in zip(asked, lengths, strict=True)
    ]
    return complete(model, processor, begun, [new[index] for index in range(len(asked))], started)


def batches_of(lengths: Sequence[int], batch_size: int, of_one_length: bool) -> list[list[int]]:
    """Indices in batches; of_one_length: without filler, which recurrent layers would read behind a head."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length if of_one_length else 0, []).append(index)
    return [
        group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
    ]


def tokenize(processor: Processor, text: str) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (1, tokens) of a text, without what a tokenizer adds."""
    input_ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def with_masks(prepared: Sequence[Prepared], output: Mapping[str, Any]) -> list[Answer]:
    """Their answers with `keep_mask` and `token_scores` of their videos, which a model's output has in one list."""
    masks, scores = (iter(output.get(name) or ()) for name in ("keep_mask", "token_scores"))

    def fill(answer: Answer) -> Answer:
        if not answer.timestamps:  # it has no video
            return answer
        found: dict[str, Any] = {"keep_mask": next(masks).cpu(), "token_scores": next(scores).float().cpu()}
        return dataclasses.replace(answer, **found, others=tuple(map(fill, answer.others)))

    return [fill(one.begun) for one in prepared]


def complete(
    model: Any, processor: Processor, begun: Sequence[Answer], new: Iterable[torch.Tensor], started: float
) -> list[Answer]:
    """Answers with these new tokens. started: by `time.perf_counter`."""
    tokens = [row.tolist() for row in new]
    seconds = (time.perf_counter() - started) / max(1, len(begun))
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [
        dataclasses.replace(
            answer,
            answer=processor.decode(row, skip_special_tokens=True).strip(),
            new_tokens=next((count for count, token in enumerate(row, 1) if token in ends), len(row)),
            seconds=seconds,
        )
        for answer, row in zip(begun, tokens, strict=True)
    ]


def join_prompts(
    processor: Processor, prompts: Sequence[Mapping[str, torch.Tensor]], padding_side: str = "left"
) -> Mapping[str, torch.Tensor]:
    """A batch of prompts, or of tails, that came one by one."""
    if len(prompts) == 1:
        return prompts[0]
    vision = [{name: value for name, value in prompt.items() if name not in _PER_TOKEN} for prompt in prompts]
    text = {}
    # Not by the tokenizer, which keeps state when it pads, so that threads would disturb each other.
    for name in [name for name in _PER_TOKEN if name in prompts[0]]:
        filler = (processor.tokenizer.pad_token_id or 0) if name == "input_ids" else 0
        rows = [prompt[name][0] for prompt in prompts]
        text[name] = pad_sequence(rows, batch_first=True, padding_value=filler, padding_side=padding_side)
    return {**text, **join_vision(vision)}


def inputs_for(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A processor's output on the model's device, pixels in its dtype; grids of videos stay on the host."""
    moved = {**BatchFeature(dict(inputs)).to(model.device)}
    pixels = {name: moved[name].to(model.dtype) for name in moved if name.startswith("pixel_values")}
    return moved | pixels | {name: inputs[name] for name in inputs if name.startswith("video_grid")}
