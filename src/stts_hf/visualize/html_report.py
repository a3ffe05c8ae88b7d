"""One HTML page that holds all it shows: selectors side by side on every sampled frame, with counts, times, answers."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import matplotlib
import numpy as np
from PIL import Image

from stts_hf.inference.requests import Answer
from stts_hf.selectors import SELECTORS
from stts_hf.wording import gigaflop, saved, speed, spread

from .dimming import Array, as_array, check_outputs
from .figures import SCORES, colour_of, score_range

if TYPE_CHECKING:
    from stts_hf.benchmark.meters import Cost

TEMPLATE = "report.html"
# In base64 both take a third more: the page stays below 10 MB for up to a thousand frames of 81 blocks.
MOST_OF_FRAMES, MOST_OF_CLIP = 4_500_000, 2_000_000
QUALITIES = ((88, 1), (75, 1), (60, 1), (40, 1), (20, 1), (20, 2), (20, 4), (20, 8))  # of JPEG; pixels joined to one


def write_report(
    path: str | os.PathLike,
    frames: Array,
    answers: Mapping[str, Answer],
    *,
    facts: Mapping[str, str],
    costs: "Mapping[str, Cost] | None" = None,
    baseline: "Cost | None" = None,
    notes: Sequence[str] = (),
    clip: bytes = b"",
) -> None:
    """
    Writes the page, which needs no network and no other file. Frames are compressed until the page is small.

    Args:
        path: of the page.
        frames: `(F, H, W, 3)` uint8, the sampled frames at the size in which they are shown.
        answers: by selector, all of one video and question.
        facts: about the run, such as `{"video": "clip.mp4", "checkpoint": "my-stts"}`; all text is escaped.
        costs: what the prompt costs with each selector.
        baseline: what it costs the stock model.
        notes: sentences for the reader, such as why a selector is missing.
        clip: an MP4 of the video that a browser plays, shown where it is small enough; else the frames are played.

    Raises:
        ValueError, TypeError: frames and answers do not fit each other.
        OSError: the page cannot be written.
    """
    frames, costs = as_array(frames), costs or {}
    selectors = [_selector(name, answer, frames) | {"cost": costs.get(name)} for name, answer in answers.items()]
    answer = next(iter(answers.values()))
    data = {
        "frames": as_jpeg(frames),
        "clip": _in_base64(clip) if len(clip) <= MOST_OF_CLIP else "",
        "height": frames.shape[1],
        "width": frames.shape[2],
        "times": [round(time, 3) for time in answer.timestamps],
        "duration": round(max(answer.duration or 0.0, answer.timestamps[-1]), 3),
        "tubelet": answer.tubelet,
        "rows": answer.grid[0],
        "columns": answer.grid[1],
        "selectors": [{key: entry[key] for key in ("name", "mask", "scores")} for entry in selectors],
        "colours": (255 * matplotlib.colormaps[SCORES](np.linspace(0, 1, 32))[:, :3]).round().astype(int).tolist(),
    }
    given = {"answer": answer, "facts": facts, "notes": notes, "selectors": selectors, "data": data}
    words = {"gigaflop": gigaflop, "saved": saved, "spread": spread, "speed": speed}
    render(path, TEMPLATE, given | {"baseline": baseline} | words)


def render(path: str | os.PathLike, template: str, given: Mapping[str, Any]) -> None:
    """Writes a page of this folder's template; all text is escaped."""
    loader = jinja2.PackageLoader("stts_hf", "visualize")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.get_template(template).render(given)
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")


def _selector(name: str, answer: Answer, frames: np.ndarray) -> dict[str, Any]:
    if answer.keep_mask is None or answer.token_scores is None:
        raise ValueError(f"`answers` holds {name!r} without an answer: {answer.error or 'nothing was asked'}.")
    mask, scores = as_array(answer.keep_mask), as_array(answer.token_scores)
    check_outputs(frames, mask, answer.grid, answer.timestamps, scores, answer.tubelet)
    low, high = score_range(scores)
    relative = (np.nan_to_num(scores, nan=low).clip(low, high) - low) / (high - low or 1.0)
    return {
        "name": name,
        "about": SELECTORS[name].about if name in SELECTORS else "",
        "colour": colour_of(name),
        "answer": answer,
        "counts": mask.sum(axis=1).tolist(),
        "low": low,
        "high": high,
        "mask": _in_base64(mask.astype(np.uint8).tobytes()),
        "scores": _in_base64((255 * relative).round().astype(np.uint8).tobytes()),
    }


def as_jpeg(frames: Sequence[np.ndarray] | np.ndarray) -> list[str]:
    """The frames in base64, in the best quality in which all of them are small enough."""
    for quality, joined in QUALITIES:
        files = [io.BytesIO() for _ in frames]
        for frame, file in zip(frames, files, strict=True):
            Image.fromarray(frame).reduce(joined).save(file, "jpeg", quality=quality)
        if sum(file.tell() for file in files) <= MOST_OF_FRAMES:
            break
    return [_in_base64(file.getvalue()) for file in files]


def _in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
