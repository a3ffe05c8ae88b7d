"""Contents of the page's components: messages, the timeline of kept tokens, the table of measurements."""

import dataclasses
import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.inference.requests import Answer
from stts_hf.keeping import in_words, rule_arguments
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.selectors import SELECTORS
from stts_hf.wording import spread

from .held_clips import Progress

# A frame before and after pruning: `x, y` of blocks that stay, of 4 x 4.
KEPT_IN_DRAWING = ((1, 1), (2, 1), (1, 2), (3, 3))
HEIGHT = 48  # of the timeline, in units of its drawing
WATCHING, STOPPED = '<span class="origin">Reading the video …</span>', '<span class="origin">Stopped.</span>'


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question and its answer so far, None until the video is read. finished: it is complete or stopped."""

    question: str
    progress: Progress | None = None
    finished: bool = False
    stopped: bool = False


def introduction(about: str, link: str = "") -> str:
    """What stands above everything: title, checkpoint and device, and what tokens, blocks and dimming are."""
    named = html.escape(about)
    if link:
        named = f'<a href="{html.escape(link)}" target="_blank" rel="noopener">{named}</a>'
    blocks = "".join(
        f'<rect class="{kind}" x="{left + 12 * x}" y="{1 + 12 * y}" width="11" height="11"/>'
        for left, pruned in ((1, False), (81, True))
        for x in range(4)
        for y in range(4)
        for kind in ["kept" if not pruned or (x, y) in KEPT_IN_DRAWING else "dropped"]
    )
    return (
        f"<h1>Ask a video</h1><p>{named}</p><div class='how'>"
        f'<svg viewBox="0 0 130 50" role="img" aria-label="A frame of 16 blocks, of which 4 stay">{blocks}'
        '<path d="M55 25h16m-5-5 5 5-5 5"/></svg>'
        "<p>The model cuts each frame into blocks; each block becomes one token. Blocks that it needs "
        "least are dropped, so it reads fewer tokens. After a question, the video plays beside what the model kept: "
        "dropped blocks are dimmed and hatched.</p></div>"
    )


def as_python(checkpoint: str, question: str, run: Progress, processing: Mapping[str, Any], new_tokens: int) -> str:
    """The last question on the page, in Python. processing, new_tokens: of the `Answerer` and its limits."""
    without = {"min_pruning_ratio": 0.0, "max_pruning_ratio": 1.0, "processing": {}}  # what changes nothing
    given = {**rule_arguments(run.rule), "processing": dict(processing)}.items()
    named = ", ".join(f"{name}={value!r}" for name, value in given if value != without.get(name))
    return (
        f"import stts_hf\n\nassistant = stts_hf.load({checkpoint!r}, selector={run.selector!r})\n"
        f"with assistant.watch({Path(str(run.seen.video)).name!r}, {named}) as clip:\n"
        f"    print(clip.ask({question!r}, max_new_tokens={new_tokens}).answer)\n"
    )


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns for a `Chatbot`."""
    found = []
    for turn in turns:
        found.append({"role": "user", "content": turn.question})
        if turn.progress is None:
            words = STOPPED if turn.finished else WATCHING
        else:
            words = turn.progress.text or ("" if turn.stopped else "(an empty answer)" if turn.finished else "…")
            words += f"\n\n{STOPPED}" if turn.stopped else ""
            words += "\n\n" + origin(turn.progress)
        found.append({"role": "assistant", "content": words})
    return found


def timeline(seen: Answer) -> str:
    """
    An SVG with a bar for each of the model's `T` frames: its width is the time on screen, its height the share of kept
    blocks. The page's script moves a line with the player, and seeks the player on a click.
    """
    assert seen.keep_mask is not None  # the video was read
    kept = seen.keep_mask.sum(dim=1).tolist()
    blocks = seen.keep_mask.shape[1]
    starts = np.array(seen.timestamps[:: seen.tubelet])
    end = max(seen.duration or 0.0, float(starts[-1]) + 0.1)
    left = 1000 * np.append(starts, end) / end
    bars = "".join(
        f'<rect x="{start:.1f}" width="{max(stop - start - 0.15 * (stop - start), 0.5):.1f}" '
        f'y="{HEIGHT * (1 - count / blocks):.1f}" height="{HEIGHT * count / blocks:.1f}">'
        f"<title>{time:.1f} s: {count} of {blocks} tokens kept</title></rect>"
        for start, stop, time, count in zip(left, left[1:], starts, kept, strict=False)
    )
    return (
        f'<figure class="timeline" data-duration="{end:.3f}">'
        "<figcaption><span>Tokens kept per frame</span>"
        f"<span>{seen.video_tokens_kept:,} of {seen.video_tokens:,}</span></figcaption>"
        f'<svg viewBox="0 0 1000 {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Between {min(kept)} and {max(kept)} of {blocks} tokens kept in a frame">'
        f'<rect class="track" width="1000" height="{HEIGHT}"/>{bars}'
        f'<line class="playhead" x1="0" x2="0" y1="0" y2="{HEIGHT}"/></svg>'
        f'<div class="scale"><span>0 s</span><span>{end:.1f} s</span></div></figure>'
    )


def origin(progress: Progress) -> str:
    """The line under an answer: whether the video was read for it, and seconds to the first word."""
    dropped = _dropped(progress.rule, progress.selector)
    read = (
        "Answered from cache (video not read again)"
        if progress.held
        else f"{progress.seen.num_frames} frames read in {progress.watching:.2f} s"
    )
    first = "" if progress.first_word is None else f" · first word after {progress.first_word:.2f} s"
    return f'<p class="origin">{read}{first} · {dropped}</p>'


def table(runs: Iterable[Progress]) -> str:
    """A table with a row for each rule and selector: kept tokens, and times of first questions and of those held."""
    tokens: dict[tuple[KeepRule, str], str] = {}
    times = defaultdict[Any, list[float]](list)  # by rule, selector and column
    for run in runs:
        key = (run.rule, "" if run.rule.ratio == 0 else run.selector)
        tokens[key] = f"{run.seen.video_tokens_kept:,}"
        times[*key, "again" if run.held else "first"] += [] if run.first_word is None else [run.first_word]
        times[*key, "watching"] += [] if run.held else [run.watching]
    if not tokens:
        return ""
    lines = []
    for rule, selector in sorted(tokens, key=lambda key: (2 if key[0].ratio is None else key[0].ratio, key[1])):
        found = [times[rule, selector, name] for name in ("watching", "first", "again")]
        cells = [tokens[rule, selector], *(f"{spread(some, 2)}\u00a0s" if some else "-" for some in found)]
        head = f"<tr><th>{html.escape(_dropped(rule, selector))}</th>"
        lines.append(head + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not any(rule.ratio == 0 for rule, _ in tokens):
        lines.insert(0, '<tr class="missing"><th>nothing dropped</th><td colspan="4">not measured yet</td></tr>')
    return (
        '<table class="measured"><thead><tr><th></th><th>Video tokens</th><th>Reading</th><th>First word</th>'
        f"<th>Next question</th></tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _dropped(rule: KeepRule, selector: str) -> str:
    return "nothing dropped" if rule.ratio == 0 else f"{in_words(rule)}, {SELECTORS[selector].label}"
