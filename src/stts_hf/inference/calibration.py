"""The score threshold that keeps a given share of a user's videos: the scores of each, and the level that they give."""

import base64
import contextlib
import dataclasses
import os
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from stts_hf.data.encoding import Processor
from stts_hf.keeping import KeepRule

from .inputs import StoredVideo
from .predictor import Row, answer_rows, describe_error, read_asked, video_name

# Columns of a record with their types; where there is an error, None is allowed too.
COLUMNS: dict[str, Any] = {"id": object, "video": object, "mark": str, "scores": str, "frames": int, "blocks": int}
COLUMNS |= {"duration": float | None, "error": str | None}


def mark_of(row: Row) -> str:
    """What tells a row's video from another one in its place: size and time of change, or content; "" of a URL."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        video = row["video"].load() if isinstance(row["video"], StoredVideo) else row["video"]
        if isinstance(video, bytes):
            return f"{len(video)} {zlib.crc32(video)}"
        found = os.stat(os.path.join(row.get("media_root") or "", video))
        return f"{found.st_size} {found.st_mtime_ns}"
    return ""


def score_rows(model: Any, processor: Processor, rows: Iterable[Row], **options: Any) -> Generator[dict[str, Any]]:
    """
    A record of `COLUMNS` for each row, with the scores of its video's frames `t >= 1` in base64, of layers `0..l`
    and the selector alone. rows: as of `Predictor.predict`. options: of `answer_rows`.
    """
    answers = answer_rows(model, processor, rows, read_asked, scores_only=True, **options)
    with contextlib.closing(answers):
        for row, answer in answers:
            record = dict.fromkeys(COLUMNS) | {"id": row["id"], "video": video_name(row), "mark": mark_of(row)}
            if answer.token_scores is None:
                yield record | {"error": answer.error and describe_error(answer.error)}
                continue
            packed = base64.b64encode(answer.token_scores[1:].numpy().astype("<f4").tobytes()).decode()
            frames, blocks = answer.token_scores.shape
            yield record | {"scores": packed, "frames": frames, "blocks": blocks, "duration": answer.duration}


class Calibration:
    """
    What thresholds keep of videos, by records of `score_rows` without an error and a rule with bounds.

    scores: per video, of frames `t >= 1`, ascending. grids: `(T, 1, n)` of each. sizes: (V,) blocks.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], rule: KeepRule):
        self.rule = rule
        self.scores = [np.sort(np.frombuffer(base64.b64decode(record["scores"]), "<f4")) for record in records]
        self.grids = [(record["frames"], 1, record["blocks"]) for record in records]
        self.sizes = np.prod(self.grids, axis=1)

    def num_kept(self, threshold: float) -> np.ndarray:
        """`K` of each video (V,), as the model counts, which compares float32."""
        above = [len(video) - int(np.searchsorted(video, np.float32(threshold))) for video in self.scores]
        return np.array(dataclasses.replace(self.rule, threshold=threshold).num_kept(self.grids, above))

    def share(self, threshold: float, mean: Literal["videos", "tokens"] = "videos") -> float:
        """Mean share that stays: over videos, each the same, or over all tokens."""
        kept = self.num_kept(threshold)
        return float(kept.sum() / self.sizes.sum() if mean == "tokens" else (kept / self.sizes).mean())

    def find_threshold(self, share: float, mean: Literal["videos", "tokens"] = "videos") -> float:
        """
        The threshold whose mean share is nearest to `share`, of few digits. Raises `ValueError` where all scores are
        equal, and where frame 0 and the bounds keep more, or let less stay.
        """
        levels: Any = np.unique(np.concatenate(self.scores).clip(0)).astype(float)  # cosine's may be below by rounding
        if len(levels) < 2:
            raise ValueError("cannot be kept: all scores are equal; pass videos of more than one frame that move.")
        low, high = 0, len(levels) - 1
        most, least = (self.share(levels[index], mean) for index in (low, high))
        if not least - 0.005 <= share <= most + 0.005:
            reason = "the first frame of each video stays, and bounds hold"
            raise ValueError(f"is {share:.1%}, but must be from {least:.1%} to {most:.1%} for these videos: {reason}.")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.share(levels[middle], mean) >= share else (low, middle)
        best = min((low, high), key=lambda index: abs(self.share(levels[index], mean) - share))
        below, level = levels[best - 1] if best else 0.0, levels[best]
        rounded = (float(f"{(below + level) / 2:.{digits}g}") for digits in range(2, 17))
        return next((number for number in rounded if below < np.float32(number) <= level), float(level))
