"""Why an answer is what it is, in sentences and as one HTML page with pictures."""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import ImageDraw

from stts_hf.inference.explain import NEAR, Explanation
from stts_hf.inference.reading import Finding
from stts_hf.keeping import in_words, rule_arguments
from stts_hf.wording import percent

from .dimming import as_array, check_outputs, dim_dropped_blocks
from .html_report import as_jpeg, render

TURNS = (255, 176, 0)  # around the blocks that turn the answer
MOST_TILES = 12  # frames in the page


def settings_of(found: Explanation) -> dict[str, Finding]:
    """All settings that were tried, by what they are, the one asked about first."""
    dropped = in_words(found.asked.rule)
    settings = {f"{dropped}, {found.asked.selector}": found.asked, "nothing dropped": found.whole}
    settings |= {f"{dropped}, {name}": finding for name, finding in found.by_selector.items()}
    for finding in found.more_frames:
        words = "nothing dropped" if finding.rule.ratio == 0 else dropped
        settings[f"{finding.answer.num_frames} frames, {words}"] = finding
    return settings


def verdict(found: Explanation) -> str:
    """Why the answer is what it is, in a sentence."""
    wanted, number = f'"{found.expected}"', len(found.blocks)
    at = " and ".join(f"{moment:.2f} s" for moment in found.moment)
    blocks = "1 block" if number == 1 else f"{number} blocks together"
    where = f"at {at}" if len({frame for frame, _ in found.blocks}) < 2 else f"(the strongest at {at})"
    give, are, them = ("gives", "it is", "it") if number == 1 else ("give", "they are", "them")
    if found.cause == "dropped":
        return f"The moment was dropped: {blocks} {where} {give} {wanted} once {are} put back."
    if found.cause == "seen" and found.blocks:
        return f"The moment was seen: {blocks} {where} {give} {wanted}, and without {them} the answer is another."
    if found.cause == "seen":
        return f"The first frame, or the question alone, gives {wanted}: no later block changes that."
    if found.cause == "bias":
        return (
            f"The bias that scores add to the attention of one layer turns the answer: without it, the blocks that "
            f"stay give {wanted}. Of the dropped ones, {blocks} {where} would help most."
        )
    if found.cause == "not sampled" and found.at is not None:
        return f"The moment was never sampled: no frame within {NEAR:g} s of {found.at:.2f} s reached the model."
    if found.cause == "not sampled":
        return f"The moment was never sampled: more frames give {wanted}."
    if any(one.gives(found.expected) for one in found.by_selector.values()):
        return f"Only another selector gives {wanted}; nothing dropped does not."
    return f"No setting that was tried gives {wanted}, not even with nothing dropped: pruning is not the reason."


def sentences(found: Explanation) -> list[str]:
    """What was found, the verdict first."""
    answer, told = found.asked.answer, [verdict(found)]
    if found.turns is not None:
        low, high = (percent(round(ratio, 3)) for ratio in found.turns)
        told.append(f"The answer turns between {low} and {high} dropped.")
    elif found.asked.gives(found.expected):
        told.append("The answer does not turn at any ratio that keeps the first frame.")
    near = [place for place, time in enumerate(answer.timestamps) if abs(time - (found.at or 0)) <= NEAR]
    if found.at is not None and near:
        kept = as_array(answer.keep_mask)[sorted({place // answer.tubelet for place in near})]  # type: ignore[arg-type]
        told.append(f"Around {found.at:.2f} s {kept.sum()} of {kept.size} blocks stay.")
    return told


def commands(found: Explanation, video: str, checkpoint: str, options: Mapping[str, Any]) -> list[str]:
    """Of each remedy the command that asks so. options: of the command that was explained, beside rule and selector."""
    lines = []
    for remedy in found.remedies:
        rule = {} if "pruning_ratio" in remedy else rule_arguments(found.asked.rule)
        given = {**options, **rule, "selector": found.asked.selector, **remedy}
        words = []
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
        lines.append(
            shlex.join(["stts-hf", "run", video, found.asked.answer.question, "--checkpoint", checkpoint, *words])
        )
    return lines


def write_explanation(
    path: str | os.PathLike, frames: np.ndarray, found: Explanation, remedies: Sequence[str], facts: Mapping[str, str]
) -> None:
    """
    Writes the page, which needs no network and no other file. path, frames, facts and errors: as in `write_report`.
    found: what `explain` returned. remedies: commands to copy, of `commands`.
    """
    answer, (rows, columns) = found.asked.answer, found.asked.answer.grid
    mask = as_array(answer.keep_mask)  # type: ignore[arg-type]  # there is a video
    check_outputs(frames, mask, answer.grid, answer.timestamps, None, answer.tubelet)
    turning: dict[int, list[int]] = {}
    for frame, block in found.blocks:
        turning.setdefault(frame, []).append(block)
    spread = np.linspace(0, len(mask) - 1, min(MOST_TILES, len(mask))).round().astype(int).tolist()
    chosen = sorted({*list(turning)[:MOST_TILES]} | {*spread[: max(MOST_TILES - len(turning), 2)]})
    tiles = []
    for index in chosen:
        place = min(index * answer.tubelet, len(frames) - 1)
        picture = dim_dropped_blocks(frames[place], mask[index], answer.grid)
        width, height = picture.width / columns, picture.height / rows
        blocks = turning.get(index, [])
        for row, column in (divmod(block, columns) for block in blocks):  # numbered row by row
            box = (column * width, row * height, (column + 1) * width - 1, (row + 1) * height - 1)
            ImageDraw.Draw(picture).rectangle(box, outline=TURNS, width=max(2, picture.width // 90))
        kept = f"{mask[index].sum()} of {mask.shape[1]} kept"
        tile = {"time": f"{answer.timestamps[place]:.2f} s", "kept": kept, "turns": len(blocks)}
        tiles.append((tile, np.asarray(picture)))
    pictures = as_jpeg([picture for _, picture in tiles])
    given = {
        "found": found,
        "sentences": sentences(found),
        "settings": settings_of(found),
        "remedies": remedies,
        "facts": facts,
        "tiles": [tile | {"picture": picture} for (tile, _), picture in zip(tiles, pictures, strict=True)],
    }
    render(path, "explanation.html", given)
