"""
Why an answer is what it is: the answers with nothing dropped and by each selector, the ratio from which the answer
turns, and the fewest blocks that turn it, by a clip and a question that are read under many keep masks.

Layers `0..l` of the ViT run once, whatever is dropped. Costs count in answers with nothing dropped.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from stts_hf.data.encoding import Processor
from stts_hf.keeping import KeepRule, in_words, rule_arguments, take_rule
from stts_hf.model_parts import LANGUAGE_MODEL, VISION_TOWER, parts_of, usable_selectors, with_selector
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.modeling.video_processing_stts import check_count
from stts_hf.video.processors import get_frames

from .generate import ReadHeads, inputs_for, read_heads, tokenize
from .requests import Answer, ask_about, prepare, processing_options

NEAR = 0.25  # seconds: a moment counts as sampled if a sampled frame is this near
LIMIT = 9.0  # answers with nothing dropped after which no new step begins, of at most one more each
STEP = 0.05  # precision of the ratio from which the answer turns
CLEAR = 0.8  # share of the gain of all blocks with which a half is taken without a look at the other

Block = tuple[int, int]  # its frame, and its number there
Cause = Literal["dropped", "not sampled", "seen", "bias", "unknown"]


@dataclass(frozen=True)
class Finding:
    """
    What one setting answers. rule, selector: the setting. answer: with text and masks. probability: of its text.
    expected: probability of the answer that is looked for.
    """

    rule: KeepRule
    selector: str
    answer: Answer
    probability: float
    expected: float

    def gives(self, text: str) -> bool:
        return same(self.answer.text, text)


def same(one: str, other: str) -> bool:
    """Whether two answers have the same words, but for case and a full stop."""
    return one.lower().rstrip(". ").split() == other.lower().rstrip(". ").split()


def tokens_of(model: Any, processor: Processor, text: str) -> torch.Tensor:
    """Tokens (tokens,) of an answer, with the one that ends it."""
    (ids,), ends = tokenize(processor, text)["input_ids"], model.generation_config.eos_token_id
    return torch.tensor([*ids.tolist(), *([ends] if isinstance(ends, int) else ends or [])[:1]])


class Reading:
    """
    A clip and a question, read under many keep masks. wanted: the answer that is looked for, by default the first one.
    target: its tokens. spent: FLOPs of matrix products with the weights, in answers with nothing dropped. rest: share
    of the tower's layers after `l`.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        video: Any,
        question: str,
        *,
        expected: str | None = None,
        processing: Mapping[str, Any] | None = None,
        max_new_tokens: int = 64,
        **keep: Any,
    ) -> None:
        self.model, self.processor, self.rule = model, processor, take_rule(model.config, keep)
        if keep:
            raise TypeError(f"`explain` takes no {', '.join(sorted(keep))}. Leave it out.")
        if not isinstance(expected, str | None):
            raise TypeError(f"expected must be a text, got {expected!r:.80}.")
        check_count("max_new_tokens", max_new_tokens)
        self.options = processing_options(processor, processing, self.rule)
        self.request = replace(ask_about(processor, video, question), rule=self.rule)
        self.generation = {"max_new_tokens": max_new_tokens, "do_sample": False, "tokenizer": processor.tokenizer}
        self.tail = tokenize(processor, self.request.tail)
        self.target = torch.tensor([])
        self.wanted, self.spent, self.unit, self.weights = expected or "", 0.0, 1.0, Counter[str]()
        self.rest = 1 - (model.config.vision_config.pruning_layer + 1) / model.config.vision_config.num_hidden_layers
        for (name, part), weight in zip(parts_of(model).items(), model.parameters(), strict=True):
            self.weights[part] += 0 if "embed" in name or "lm_head" in name else weight.numel()
        self.sample()

    def sample(self, **options: Any) -> Answer:
        """Decodes the clip, with more options; returns what is known before the model runs."""
        self.prepared = prepare(self.processor, {**self.options, **options}, replace(self.request, tail=""))
        self.inputs = inputs_for(self.model, self.prepared.inputs)
        self.tower_cache, self.dense = TowerCache(), 1 - self.rest  # of the tower's layers, which run once
        return self.prepared.begun

    def charge(self, keep_mask: torch.Tensor, tokens: int) -> None:
        """Adds a pass that kept these blocks (T, n). tokens: that the language model read."""
        layers, self.dense = self.dense + self.rest * float(keep_mask.float().mean()), 0.0
        patches = layers * len(next(iter(self.tower_cache.states.values())))
        self.spent += (self.weights[VISION_TOWER] * patches + self.weights[LANGUAGE_MODEL] * tokens) / self.unit

    def answered(self, answer: torch.Tensor) -> torch.Tensor:
        """Ids (1, L) of the question and of an answer's tokens (tokens,)."""
        return torch.cat([self.tail["input_ids"][0], answer.cpu()])[None].to(self.model.device)

    @torch.no_grad()
    def rate(self, heads: ReadHeads, answer: torch.Tensor) -> float:
        """The probability of an answer's tokens (tokens,)."""
        tail, cache = self.answered(answer), heads.take(torch.tensor([0]), keep=True)
        mask = torch.cat([heads.tokens["attention_mask"], torch.ones_like(tail)], dim=-1)
        given = {"past_key_values": cache, "attention_mask": mask, "logits_to_keep": len(answer) + 1}
        return likelihood(self.model(input_ids=tail, **given).logits, answer)[1]

    @torch.no_grad()
    def holds(self, **keep: Any) -> tuple[bool, float]:
        """Whether the target is the greedy answer, and its probability. keep: how many blocks stay, or which."""
        tail = self.answered(self.target)
        more = {"input_ids": tail, "attention_mask": torch.ones_like(tail), "mm_token_type_ids": torch.zeros_like(tail)}
        texts = {name: torch.cat([self.inputs[name], of], -1) for name, of in more.items() if name in self.inputs}
        keep |= {"tower_cache": self.tower_cache, "use_cache": False, "logits_to_keep": len(self.target) + 1}
        output = self.model(**self.inputs | texts, **keep)
        (keep_mask,) = output.keep_mask
        self.charge(keep_mask, texts["input_ids"].shape[1] - int((~keep_mask).sum()))
        return likelihood(output.logits, self.target)

    def ask(self, rule: KeepRule, model: Any = None) -> Finding:
        """What a setting answers. The first one sets the unit of costs, and the target."""
        model, row = model or self.model, torch.tensor([0])
        call = {"tower_cache": self.tower_cache, **rule_arguments(rule)}
        heads = read_heads(model, self.processor, [self.prepared], **call)
        (new,) = heads.answer(model, heads.take(row, True), row, self.tail, **self.generation)
        (seen,) = heads.begun
        assert seen.keep_mask is not None  # there is a video
        self.charge(seen.keep_mask, heads.columns + 3 * self.answered(new).shape[1])  # it is rated twice
        text = self.processor.decode(new.tolist(), skip_special_tokens=True).strip()
        if not len(self.target):
            self.unit, self.spent, self.wanted = self.spent, 1.0, self.wanted or text
            self.target = new if same(text, self.wanted) else tokens_of(self.model, self.processor, self.wanted)
        rated = [self.rate(heads, answer) for answer in (new, self.target)]
        return Finding(rule, model.config.vision_config.selector, replace(seen, answer=text), *rated)


def likelihood(logits: torch.Tensor, answer: torch.Tensor) -> tuple[bool, float]:
    """If an answer's tokens (tokens,) are greedy by logits (1, tokens + 1, vocabulary), and their probability."""
    likely, chosen = logits[0, :-1].float().log_softmax(-1), answer.to(logits.device)
    return bool((likely.argmax(-1) == chosen).all()), float(likely.gather(1, chosen[:, None]).sum().exp())


@dataclass(frozen=True)
class Explanation:
    """
    Why an answer is what it is.

    Attributes:
        asked, whole: what the call answers, and what it answers with nothing dropped.
        by_selector: what each selector answers that drops as much.
        more_frames: what it answers about more frames, where that was tried.
        expected: the answer that is looked for: as it was passed, else that with nothing dropped.
        cause: "dropped"; "not sampled"; "seen", where what stays is enough for `expected`, or what was dropped does not
            matter; "bias", where the same blocks give `expected` without the bias of the scores; "unknown", where no
            setting gives it.
        at: seconds that were asked about.
        blocks: `(frame, block)`, the fewest found that turn the answer, the strongest first.
        turns: ratios between which the answer turns; None where it does not.
        remedies: settings that give `expected`, the best first, as options of a command; more frames where the moment
            `at` was not sampled.
        cost: in answers with nothing dropped.
    """

    asked: Finding
    whole: Finding
    by_selector: dict[str, Finding]
    more_frames: tuple[Finding, ...]
    expected: str
    cause: Cause
    at: float | None
    blocks: tuple[Block, ...]
    turns: tuple[float, float] | None
    remedies: tuple[dict[str, Any], ...]
    cost: float

    @property
    def puts_back(self) -> bool:
        """Whether `blocks` were dropped and give `expected` once put back; else, without them the answer changes."""
        return not self.asked.gives(self.expected)

    @property
    def moment(self) -> tuple[float, ...]:
        """Seconds of the frames that matter."""
        if not self.blocks or self.cause == "not sampled":
            return () if self.at is None else (self.at,)
        tubelet = self.asked.answer.tubelet
        return self.asked.answer.timestamps[self.blocks[0][0] * tubelet :][:tubelet]


class Search:
    """
    The fewest blocks that turn an answer: dropped ones that are put back, or kept ones that are taken away. A block is
    `(frame, number in the frame)`. Frame 0 stays.
    """

    def __init__(self, reading: Reading, answer: Answer, puts_back: bool) -> None:
        assert answer.keep_mask is not None  # there is a video
        self.reading, self.mask, self.columns = reading, answer.keep_mask.clone(), answer.grid[1]
        self.mask[0] = True  # it goes at ratio 1 alone
        self.puts_back, self.clear = puts_back, math.inf

    def run(self, near: set[int], probability: float) -> tuple[Literal["dropped", "seen", "bias"], list[Block]]:
        """The cause, and the blocks. near: frames to search first. probability: of the target, nothing dropped."""
        changing = self.mask != self.puts_back
        changing[0] = False
        every = [(frame, place) for frame, place in changing.nonzero().tolist()]
        turned, gain = self.measure([] if self.puts_back else every)
        if not every or not (turned or self.puts_back):
            return "dropped" if self.puts_back else "seen", []
        if turned and self.puts_back:  # without the bias of the scores: then what helps most
            return "bias", self.fewest(every)
        self.clear = CLEAR * (probability if self.puts_back else gain)
        some = [block for block in every if block[0] in near]
        blocks = self.fewest(some if some and self.measure(some)[0] else every)
        return "dropped" if self.puts_back else "seen", blocks

    def measure(self, blocks: Sequence[Block]) -> tuple[bool, float]:
        """Whether the answer turns if these blocks change sides, and how much the target gains by it, or loses."""
        mask = self.mask.clone()
        for block in blocks:
            mask[block] = self.puts_back
        ratio = 1 - int(mask.sum()) / mask.numel()
        holds, probability = self.reading.holds(block_scores=mask.flatten().float(), pruning_ratio=ratio)
        return holds == self.puts_back, probability if self.puts_back else 1 - probability

    def halves(self, group: list[Block]) -> list[list[Block]]:
        """Of several frames the earlier and the later ones, of one frame the two sides of its longer axis."""
        places = [(frame, *divmod(place, self.columns)) for frame, place in group]
        lengths = [len({*along}) for along in zip(*places, strict=True)]
        axis = 0 if lengths[0] > 1 else max((1, 2), key=lengths.__getitem__)
        keys = [place[axis] for place in places]
        middle = sorted({*keys})[lengths[axis] // 2]
        halves: list[list[Block]] = [[], []]
        for block, key in zip(group, keys, strict=True):
            halves[key >= middle].append(block)
        return halves

    def fewest(self, group: list[Block], given: Sequence[Block] = ()) -> list[Block]:
        """The fewest of a group that turn the answer beside those that are given (QuickXplain, Junker 2004)."""
        tried: list[tuple[bool, float, list[Block]]] = []
        for half in self.halves(group):
            if len(group) == 1 or self.reading.spent > LIMIT:
                return next((half for turns, _, half in tried if turns), group)
            tried.append((*self.measure([*given, *half]), half))
            if tried[-1][0] and tried[-1][1] >= self.clear:
                break
        (turns, _, best), *others = sorted(tried, key=lambda one: one[:2], reverse=True)
        if turns:
            return self.fewest(best, given)
        some = self.fewest(best, [*given, *others[0][2]])
        return some + self.fewest(others[0][2], [*given, *some])


def find_turn(reading: Reading, asked: Finding, whole_is_right: bool, is_right: bool) -> tuple[float, float] | None:
    """Ratios, `STEP` apart, between which the target becomes the answer, or stops being it, by bisection."""
    answer = asked.answer
    low, high = 0.0, 1 - answer.video_tokens_kept / answer.video_tokens
    if whole_is_right == is_right:
        low, high = high, 1 - answer.grid[0] * answer.grid[1] / answer.video_tokens  # all but the first frame
        if low >= high or reading.holds(pruning_ratio=high)[0]:
            return None
    while high - low > STEP and reading.spent <= LIMIT:
        middle = round((low + high) / 2, 2)
        turned = reading.holds(pruning_ratio=middle)[0] != whole_is_right
        low, high = (low, middle) if turned else (middle, high)
    return low, high


def look_closer(reading: Reading, missed: float | None) -> tuple[list[Finding], list[dict[str, Any]]]:
    """
    What the model answers about more frames, twice and four times as many, or as many as reach a moment that was
    missed; and the options that give the answer that is looked for, or that reach the moment.
    """
    begun, tried, closer = reading.prepared.begun, list[Finding](), dict[str, Any]()
    end, most = begun.duration or begun.timestamps[-1], get_frames(reading.processor.video_processor)["max_fps"]
    for number in [2 * begun.num_frames, 4 * begun.num_frames] if missed is None else [math.ceil(end / (2 * NEAR)) + 1]:
        rate = math.ceil((number - 1) / (end or math.inf))
        closer = {"num_frames": number} | ({} if most is None or rate <= most else {"max_fps": rate})
        if reading.sample(**closer).num_frames <= begun.num_frames:
            break
        for one in dict.fromkeys([reading.rule, KeepRule(0.0)]):
            if reading.spent + number / begun.num_frames > LIMIT + 1:
                break
            tried.append(reading.ask(one))
            if tried[-1].gives(reading.wanted):
                return tried, [closer if one == reading.rule else closer | {"pruning_ratio": 0.0}]
    return tried, [] if missed is None else [closer]


def explain(reading: Reading, at: float | None) -> Explanation:
    """
    Why the answer is what it is, of a reading that nothing has been asked yet. at: seconds that the question is about.
    Raises `ValueError` where nothing is dropped, or for a moment behind the end of the video.
    """
    begun = reading.prepared.begun
    end = begun.duration or begun.timestamps[-1]
    if at is not None and not 0 <= at <= end:
        raise ValueError(f"at is {at:g} s, but the video lasts {end:.2f} s. Pass a moment within it.")
    whole, asked = reading.ask(KeepRule(0.0)), reading.ask(reading.rule)
    whole_is_right, is_right = (one.gives(reading.wanted) for one in (whole, asked))
    share = 1 - asked.answer.video_tokens_kept / asked.answer.video_tokens
    if share == 0:
        raise ValueError(f"Nothing is dropped of this video ({in_words(reading.rule)}). Pass a higher pruning_ratio.")
    names = [name for name in usable_selectors(reading.model) if name != asked.selector]
    others = {name: reading.ask(KeepRule(share), with_selector(reading.model, name)) for name in names}
    places = [] if at is None else [place for place, time in enumerate(begun.timestamps) if abs(time - at) <= NEAR]
    missed = None if places else at
    cause: Cause = "unknown"
    turns, blocks, frames, remedies = None, list[Block](), list[Finding](), list[dict[str, Any]]()
    if whole_is_right or is_right:
        turns = find_turn(reading, asked, whole_is_right, is_right)
        near = {place // asked.answer.tubelet for place in places}
        cause, blocks = Search(reading, asked.answer, not is_right).run(near, whole.expected)
    if cause == "unknown" or missed is not None:
        frames, remedies = look_closer(reading, missed)
        cause = "not sampled" if remedies else cause
    if not is_right:
        good = [name for name, finding in others.items() if finding.gives(reading.wanted) and name != "random"]
        remedies += [{"selector": name} for name in good]
        remedies += [] if turns is None else [{"pruning_ratio": turns[0]}]
    found: dict[str, Any] = {"cause": cause, "turns": turns, "blocks": tuple(blocks), "at": at}
    found |= {"more_frames": tuple(frames), "remedies": tuple(remedies)}
    return Explanation(asked, whole, others, expected=reading.wanted, cost=reading.spent, **found)
