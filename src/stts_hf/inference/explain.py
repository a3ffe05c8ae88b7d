"""
Why an answer is what it is: the answers with nothing dropped and by each selector, the ratio from which the answer
turns, and the fewest blocks that turn it.

Layers `0..l` of the ViT run once, whatever is dropped. Costs count in answers with nothing dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stts_hf.keeping import KeepRule, in_words
from stts_hf.model_parts import usable_selectors, with_selector
from stts_hf.video.processors import get_frames

from .reading import Finding, Reading
from .requests import Answer

NEAR = 0.25  # seconds: a moment counts as sampled if a sampled frame is this near
LIMIT = 9.0  # answers with nothing dropped after which no new step begins, of at most one more each
STEP = 0.05  # precision of the ratio from which the answer turns
CLEAR = 0.8  # share of the gain of all blocks with which a half is taken without a look at the other

Block = tuple[int, int]  # its frame, and its number there
Cause = Literal["dropped", "not sampled", "seen", "bias", "unknown"]


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
        for one in [reading.rule, *([] if reading.prepared.scales else [KeepRule(0.0)])]:
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
        remedies += [] if turns is None or reading.prepared.scales else [{"pruning_ratio": turns[0]}]
    found: dict[str, Any] = {"cause": cause, "turns": turns, "blocks": tuple(blocks), "at": at}
    found |= {"more_frames": tuple(frames), "remedies": tuple(remedies)}
    return Explanation(asked, whole, others, expected=reading.wanted, cost=reading.spent, **found)
