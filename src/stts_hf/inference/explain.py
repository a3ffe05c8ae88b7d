"""
Why an answer is what it is: the answers with nothing dropped and by each selector, the ratio from which the answer
turns, and the fewest blocks that turn it.

Layers `0..l` of the ViT run once, whatever is dropped. Costs count in answers with nothing dropped.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from stts_hf.data.encoding import Processor
from stts_hf.keeping import KeepRule, in_words, take_rule
from stts_hf.model_parts import LANGUAGE_MODEL, VISION_TOWER, parts_of, usable_selectors, with_selector
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.video.processors import get_frames

from .generate import ReadHeads, inputs_for, read_heads, tokenize, tokenize_tails, with_masks
from .requests import Answer, Prepared, Request, ask_about, prepare, processing_options

NEAR = 0.25  # seconds: a moment counts as sampled if a sampled frame is this near
LIMIT = 9.0  # answers with nothing dropped after which no new step begins, of at most one more each
STEP = 0.05  # precision of the ratio from which the answer turns
FEW = 12  # blocks among which several are looked for that turn the answer together
CLEAR = 0.8  # share of the gain of all blocks with which a half is taken without a look at the other


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
        at, moment: seconds that were asked about; those of the frames that matter.
        blocks: `(frame, block)`, the fewest found that turn the answer, the strongest first.
        puts_back: whether `blocks` were dropped and give `expected` once they are put back; else they were kept, and
            without them the answer is another.
        turns: ratios between which the answer turns; None where it does not.
        remedies: settings that give `expected`, the best first, as options of a command.
        cost: in answers with nothing dropped.
    """

    asked: Finding
    whole: Finding
    by_selector: dict[str, Finding]
    more_frames: tuple[Finding, ...]
    expected: str
    cause: Literal["dropped", "not sampled", "seen", "bias", "unknown"]
    at: float | None
    moment: tuple[float, ...]
    blocks: tuple[tuple[int, int], ...]
    puts_back: bool
    turns: tuple[float, float] | None
    remedies: tuple[dict[str, Any], ...]
    cost: float


def same(one: str, other: str) -> bool:
    """Whether two answers have the same words, but for case and a full stop."""
    return one.lower().rstrip(". ").split() == other.lower().rstrip(". ").split()


class Reading:
    """
    A clip and a question, read under many keep masks. spent: FLOPs of matrix products with the weights, in answers with
    nothing dropped. target: tokens of the answer that is looked for, the first answer's until it is set.
    """

    def __init__(
        self, model: Any, processor: Processor, request: Request, options: Mapping[str, Any], new: int
    ) -> None:
        self.model, self.processor, self.request = model, processor, request
        self.options = {"max_new_tokens": new, "do_sample": False, "tokenizer": processor.tokenizer}
        self.prepared = prepare(processor, options, replace(request, tail=""))
        self.inputs, self.tail = inputs_for(model, self.prepared.inputs), tokenize_tails(processor, [request.tail])
        self.tower_cache, self.target = TowerCache(), torch.tensor([])
        self.spent, self.unit = 0.0, 0.0
        weights, vision = Counter[str](), model.config.vision_config
        for (name, part), weight in zip(parts_of(model).items(), model.parameters(), strict=True):
            weights[part] += 0 if "embed" in name or "lm_head" in name else weight.numel()
        self.weights, self.rest = weights, 1 - (vision.pruning_layer + 1) / vision.num_hidden_layers

    def charge(self, keep_mask: torch.Tensor, tokens: int) -> None:
        """Adds what a pass cost. tokens: of text that the language model read, over all its calls."""
        patches, kept = len(next(iter(self.tower_cache.states.values()))), float(keep_mask.float().mean())
        text = self.weights[LANGUAGE_MODEL] * (int(keep_mask.sum()) + tokens)
        tower = self.weights[VISION_TOWER] * patches
        if not self.unit:  # the first pass, with nothing dropped
            self.unit = tower + text
        self.spent += (tower * (self.rest * kept if self.spent else 1) + text) / self.unit

    def answered(self, answer: torch.Tensor) -> torch.Tensor:
        """Ids (1, L) of the question and of an answer's tokens (tokens,)."""
        return torch.cat([self.tail["input_ids"][0], answer.cpu()])[None].to(self.model.device)

    @torch.no_grad()
    def rate(self, heads: ReadHeads, answer: torch.Tensor) -> float:
        """The probability of an answer's tokens (tokens,)."""
        tail = self.answered(answer)
        mask = torch.cat([heads.tokens["attention_mask"], torch.ones_like(tail)], dim=-1)
        given = {"past_key_values": heads.take(torch.tensor([0]), keep=True), "attention_mask": mask}
        return likelihood(self.model(input_ids=tail, **given, logits_to_keep=len(answer) + 1).logits, answer)[0]

    def ask(self, rule: KeepRule, model: Any = None) -> Finding:
        """What a setting answers."""
        model, row = model or self.model, torch.tensor([0])
        keep = Prepared.arguments([replace(self.prepared, rule=rule)])
        heads = read_heads(model, self.prepared.inputs, tower_cache=self.tower_cache, **keep)
        found, _ = heads.answer(model, heads.take(row, True), row, self.tail, **self.options)
        self.target = self.target if len(self.target) else found[0]
        (seen,) = with_masks([self.prepared.begun], heads.keep_mask, heads.token_scores)
        seen = replace(seen, answer=self.processor.decode(found[0].tolist(), skip_special_tokens=True).strip())
        assert seen.keep_mask is not None  # there is a video
        self.charge(
            seen.keep_mask, heads.columns - seen.video_tokens_kept + len(self.tail["input_ids"][0]) + len(found[0])
        )
        rated = self.rate(heads, found[0]), self.rate(heads, self.target)
        return Finding(rule, model.config.vision_config.selector, seen, *rated)

    @torch.no_grad()
    def holds(self, **keep: Any) -> tuple[bool, float]:
        """Whether the target is the greedy answer, and its probability, in one pass."""
        tail = self.answered(self.target)
        more = {"input_ids": tail, "attention_mask": torch.ones_like(tail), "mm_token_type_ids": torch.zeros_like(tail)}
        texts = {name: torch.cat([self.inputs[name], of[:1]], -1) for name, of in more.items() if name in self.inputs}
        options = {**keep, "tower_cache": self.tower_cache, "use_cache": False, "logits_to_keep": len(self.target) + 1}
        output = self.model(**self.inputs | texts, **options)
        self.charge(output.keep_mask[0], texts["input_ids"].shape[1] - output.keep_mask[0].numel())
        probability, is_greedy = likelihood(output.logits, self.target)
        return is_greedy, probability

    def look_for(self, text: str) -> None:
        """Sets the target."""
        (ids,) = tokenize(self.processor, [text])
        ends = self.model.generation_config.eos_token_id
        self.target = torch.tensor([*ids.tolist(), *([ends] if isinstance(ends, int) else ends or [])[:1]])


def likelihood(logits: torch.Tensor, answer: torch.Tensor) -> tuple[float, bool]:
    """The probability of an answer's tokens (tokens,) by logits (1, tokens + 1, vocabulary), and if it is greedy."""
    likely, chosen = logits[0, :-1].float().log_softmax(-1), answer.to(logits.device)
    return float(likely.gather(1, chosen[:, None]).sum().exp()), bool((likely.argmax(-1) == chosen).all())


class Search:
    """
    The fewest blocks that turn the answer. keep_mask: (T, n), what is kept before. puts_back: whether dropped blocks
    are put back, or kept ones taken away. columns: of blocks in a frame.
    """

    def __init__(self, reading: Reading, keep_mask: torch.Tensor, columns: int, puts_back: bool) -> None:
        self.reading, self.mask, self.size = reading, keep_mask.flatten().clone(), keep_mask.shape[1]
        self.mask[: self.size] = True  # frame 0 goes at ratio 1 alone
        self.columns, self.puts_back = columns, puts_back
        later = (self.mask != puts_back).nonzero().flatten().tolist()
        self.all = [block for block in later if block >= self.size]
        self.clear = 0.0

    def run(self, near: set[int], probability: float) -> tuple[list[int], bool]:
        """
        The blocks, and whether it is they that turn the answer. near: frames that are searched first. probability: of
        the target with nothing dropped.
        """
        turned, gain = self.measure([] if self.puts_back else self.all)
        if turned and self.puts_back:  # without the bias of the scores: then what helps most
            self.clear = math.inf
            return self.descend(self.all), False
        if not turned and not self.puts_back:
            return [], False
        self.clear = CLEAR * (probability if self.puts_back else gain)
        some = [block for block in self.all if block // self.size in near]
        return self.descend(some if some and self.measure(some)[0] else self.all), True

    def measure(self, blocks: Sequence[int]) -> tuple[bool, float]:
        """Whether the answer turns if these blocks change sides, and how much the target gains by it, or loses."""
        mask = self.mask.clone()
        mask[list(blocks)] = self.puts_back
        ratio = 1 - int(mask.sum()) / len(mask)
        holds, probability = self.reading.holds(block_scores=mask.float(), pruning_ratio=ratio)
        return holds == self.puts_back, probability if self.puts_back else 1 - probability

    def halves(self, group: list[int]) -> list[list[int]]:
        """Of several frames the earlier and the later ones, of one frame the two sides of its longer axis."""
        if len(group) == 1:
            return [group]
        keys = [block // self.size for block in group]
        if len({*keys}) == 1:
            places = [divmod(block % self.size, self.columns) for block in group]
            axis = max((0, 1), key=lambda axis: len({place[axis] for place in places}))
            keys = [place[axis] for place in places]
        middle = sorted({*keys})[len({*keys}) // 2]
        pairs = list(zip(group, keys, strict=True))
        return [[block for block, key in pairs if key < middle], [block for block, key in pairs if key >= middle]]

    def try_parts(self, parts: list[list[int]], given: Sequence[int] = ()) -> list[tuple[bool, float, list[int]]]:
        """Whether each part turns the answer beside those that are given, and its gain, the best part first."""
        tried: list[tuple[bool, float, list[int]]] = []
        for part in parts:
            tried.append((*self.measure([*given, *part]), part))
            if tried[-1][0] and tried[-1][1] >= self.clear:
                break
        key = (lambda one: one[1]) if self.clear == math.inf else (lambda one: one[:2])
        return sorted(tried, key=key, reverse=True)

    def descend(self, group: list[int]) -> list[int]:
        """
        The fewest of a group that turn the answer, as far as halving finds them, the strongest first. Where no half
        turns it, the two with most gain are halved on.
        """
        beam, found = [group], group
        while any(len(some) > 1 for some in beam) and self.reading.spent <= LIMIT:
            tried = self.try_parts([part for some in beam for part in self.halves(some)])
            turns, _, best = tried[0]
            if turns and self.clear < math.inf:
                beam, found = [best], best
            elif beam == [found] and len(found) <= FEW and self.clear < math.inf:
                return self.combine(found)
            else:
                frames = {block // self.size for block in best}
                beam = [part for _, _, part in tried[: 2 if len(frames) > 1 else 1]]
        return beam[0] if self.clear == math.inf else beam[0] + [block for block in found if block not in beam[0]]

    def combine(self, group: list[int], given: Sequence[int] = ()) -> list[int]:
        """The fewest of a group that turn the answer beside those that are given (QuickXplain, Junker 2004)."""
        if len(group) == 1 or self.reading.spent > LIMIT:
            return group
        (turns, _, best), *others = self.try_parts(self.halves(group), given)
        if turns:
            return self.combine(best, given)
        some = self.combine(best, [*given, *others[0][2]])
        return some + self.combine(others[0][2], [*given, *some])


def find_turn(reading: Reading, low: float, high: float, low_holds: bool) -> tuple[float, float]:
    """Narrows the ratios between which the target becomes the answer, or stops to be it, by bisection."""
    while high - low > STEP and reading.spent <= LIMIT:
        middle = round((low + high) / 2, 2)
        low, high = (middle, high) if reading.holds(pruning_ratio=middle)[0] == low_holds else (low, middle)
    return low, high


def more_frames(processor: Processor, begun: Answer, number: int) -> dict[str, Any]:
    """Options of a processor's call for this number of frames."""
    options: dict[str, Any] = {"num_frames": number}
    rate, most = (number - 1) / (begun.duration or math.inf), get_frames(processor.video_processor)["max_fps"]
    return options if most is None or rate <= most else options | {"max_fps": math.ceil(rate)}


def explain(
    model: Any,
    processor: Processor,
    video: Any,
    question: str,
    *,
    expected: str | None = None,
    at: float | None = None,
    processing: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    **keep: Any,
) -> Explanation:
    """
    Why the answer to a question about a video is what it is; see `VideoAssistant.explain`.

    Raises:
        TypeError, ValueError: as `VideoAssistant.answer`; nothing is dropped; `at` is behind the end of the video.
    """
    rule = take_rule(model.config, keep)
    if keep:
        raise TypeError(f"`explain` takes no {', '.join(sorted(keep))}.")
    if video is None:
        raise ValueError("video is None, but pruning drops tokens of videos alone. Pass a video with the question.")
    options = processing_options(processor, processing, rule)
    request = replace(ask_about(processor, video, question), rule=rule)
    reading = Reading(model, processor, request, options, max_new_tokens)
    begun, rule = reading.prepared.begun, reading.prepared.rule or rule
    if at is not None and not 0 <= at <= (begun.duration or begun.timestamps[-1]):
        raise ValueError(f"at is {at:g} s, but the video lasts {begun.duration:.2f} s. Pass a moment within it.")
    whole = reading.ask(KeepRule(0.0))
    wanted = expected or whole.answer.text
    if not whole.gives(wanted):
        reading.look_for(wanted)
    asked = reading.ask(rule)
    share = 1 - asked.answer.video_tokens_kept / asked.answer.video_tokens
    if share == 0:
        raise ValueError(f"Nothing is dropped of this video ({in_words(rule)}). Pass a higher pruning_ratio.")
    names = [name for name in usable_selectors(model) if name != asked.selector]
    others = {name: reading.ask(KeepRule(share), with_selector(model, name)) for name in names}
    found = _search(reading, whole, asked, share, wanted, at)
    if found["cause"] == "unknown" or (found["cause"] == "not sampled" and at is not None):
        found |= _look_closer(reading, request, options, rule, wanted, at)
    good = [name for name, finding in others.items() if finding.gives(wanted) and name != "random"]
    remedies: list[dict[str, Any]] = [{"selector": name} for name in good if not asked.gives(wanted)]
    if not asked.gives(wanted) and whole.gives(wanted):
        remedies.append({"pruning_ratio": found["turns"][0]})
    remedies = [*found.pop("remedies", ()), *remedies]
    return Explanation(asked, whole, others, expected=wanted, remedies=tuple(remedies), cost=reading.spent, **found)


def _search(
    reading: Reading, whole: Finding, asked: Finding, share: float, wanted: str, at: float | None
) -> dict[str, Any]:
    """Fields of `Explanation` that follow from one reading of the clip."""
    puts_back, answer = not asked.gives(wanted), asked.answer
    assert answer.keep_mask is not None  # there is a video
    near = {place // answer.tubelet for place, time in enumerate(answer.timestamps) if abs(time - (at or 0)) <= NEAR}
    found: dict[str, Any] = {"puts_back": puts_back, "blocks": (), "turns": None, "more_frames": ()}
    found |= {"cause": "unknown", "at": at, "moment": () if at is None else (at,)}
    if whole.gives(wanted) or not puts_back:
        top = 1 - answer.grid[0] * answer.grid[1] / answer.video_tokens  # but the first frame
        if whole.gives(wanted) == puts_back:
            found["turns"] = find_turn(reading, 0.0, share, puts_back)
        elif share < top and not reading.holds(pruning_ratio=top)[0]:
            found["turns"] = find_turn(reading, share, top, True)
        search = Search(reading, answer.keep_mask, answer.grid[1], puts_back)
        blocks, turned = search.run(near if at is not None else set(), whole.expected)
        found["blocks"] = tuple(divmod(block, search.size) for block in blocks)
        found["cause"] = "seen" if not puts_back else "dropped" if turned else "bias"
        if blocks:
            first = found["blocks"][0][0] * answer.tubelet
            found["moment"] = answer.timestamps[first : first + answer.tubelet]
    if at is not None and not near:
        found |= {"cause": "not sampled", "moment": (at,)}
    return found


def _look_closer(
    reading: Reading, request: Request, options: dict[str, Any], rule: KeepRule, wanted: str, at: float | None
) -> dict[str, Any]:
    """The same about more frames: twice and four times as many, or as many as reach the moment `at`."""
    begun, tried = reading.prepared.begun, []
    numbers = [2 * begun.num_frames, 4 * begun.num_frames]
    if at is not None:
        numbers = [math.ceil((begun.duration or begun.timestamps[-1]) / (2 * NEAR)) + 1]
    for number in numbers:
        closer = more_frames(reading.processor, begun, number)
        again = Reading(reading.model, reading.processor, request, options | closer, reading.options["max_new_tokens"])
        if again.prepared.begun.num_frames <= begun.num_frames:
            break
        again.target, again.unit = reading.target, reading.unit
        for rules in dict.fromkeys([rule, KeepRule(0.0)]):
            if reading.spent + again.spent + number / begun.num_frames > LIMIT + 1:
                break
            tried.append(again.ask(rules))
            if tried[-1].gives(wanted):
                given = {"pruning_ratio": 0.0} if rules is not rule else {}
                return {"cause": "not sampled", "more_frames": tuple(tried), "remedies": [closer | given]}
        reading.spent += again.spent
    found: dict[str, Any] = {"more_frames": tuple(tried)}
    return found if at is None else found | {"remedies": [more_frames(reading.processor, begun, numbers[0])]}
