"""
LongVideoBench and VideoMME with subtitles as Molmo2 is asked: the lines on screen within a second of a frame that is
shown, with their times. Read when the question is asked, so that a missing file costs that question only.
"""

import json
from pathlib import Path
from typing import Any

from lmms_eval.tasks.longvideobench import utils as longvideobench
from lmms_eval.tasks.videomme import utils as videomme

from stts_hf.data.prompts import read_subtitles, subtitle_text
from stts_hf.modeling.video_processing_stts import sample_times
from stts_hf.modeling.video_reading_stts import VideoFile

_NEAR = 1.0  # seconds; Molmo2's `subtitle_mode="frame_1"`

longvideobench_doc_to_visual = longvideobench.longvideobench_doc_to_visual_v
longvideobench_doc_to_text = longvideobench.longvideobench_doc_to_text
longvideobench_process_results = longvideobench.longvideobench_process_results
longvideobench_aggregate_results = longvideobench.longvideobench_aggregate_results
videomme_doc_to_visual = videomme.videomme_doc_to_visual
videomme_doc_to_text = videomme.videomme_doc_to_text
videomme_process_results = videomme.videomme_process_results
videomme_aggregate_results = videomme.videomme_aggregate_results


def longvideobench_doc_to_messages(
    doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """The video, the subtitles of the part of it that is there, and the question."""
    video = Path(longvideobench_doc_to_visual(doc)[0])
    lines = json.loads((video.parents[1] / "subtitles" / doc["subtitle_path"]).read_text(encoding="utf-8"))
    question = longvideobench_doc_to_text(doc, lmms_eval_specific_kwargs)
    return _ask(video, [_cue(line, doc) for line in lines], question, lmms_eval_specific_kwargs)


def videomme_doc_to_messages(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The video, its subtitles where it has some, and the question."""
    video = Path(videomme_doc_to_visual(doc)[0])
    file = video.parents[1] / "subtitle" / f"{doc['videoID']}.srt"
    there = file.is_file() and file.read_text(encoding="utf-8", errors="replace").strip()
    cues = read_subtitles(file) if there else []
    return _ask(video, cues, videomme_doc_to_text(doc, lmms_eval_specific_kwargs), lmms_eval_specific_kwargs)


def _ask(
    video: Path, cues: list[tuple[float, float, str]], question: str, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    with VideoFile(str(video)) as file:
        times = file.times[sample_times(file.times, file.duration, settings["num_frames"], settings["max_fps"])]
    shown = [
        {"start": max(start, 0.0), "end": end, "text": text}
        for start, end, text in cues
        if text.strip() and ((times >= start - _NEAR) & (times <= end + _NEAR)).any()
    ]
    text = f"{subtitle_text(shown)}\n{question}" if shown else question
    content = [{"type": "video", "url": str(video)}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def _cue(line: dict[str, Any], doc: dict[str, Any]) -> tuple[float, float, str]:
    """A line of either kind of LongVideoBench's subtitle files, in seconds of the video."""
    shift = doc["starting_timestamp_for_subtitles"]
    if "timestamp" in line:
        (start, end), text = line["timestamp"], line["text"]
        end = end if isinstance(end, int | float) else shift + doc["duration"]  # the last line may have no end
    else:
        start, end = (longvideobench.timestamp_to_seconds(line[name]) for name in ("start", "end"))
        text = line["line"]
    return start - shift, end - shift, text
