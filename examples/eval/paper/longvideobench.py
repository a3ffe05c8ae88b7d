"""LongVideoBench's questions, with all subtitles of the part of the video that is shown."""

import json
from pathlib import Path
from typing import Any

from lmms_eval.tasks.longvideobench import utils

from stts_hf.data.prompts import subtitle_text

doc_to_visual = utils.longvideobench_doc_to_visual_v
process_results = utils.longvideobench_process_results
aggregate_results = utils.longvideobench_aggregate_results


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]) -> str:
    """The subtitles, and the question behind them."""
    video = Path(utils.longvideobench_doc_to_visual_v(doc)[0])
    lines = json.loads((video.parents[1] / "subtitles" / doc["subtitle_path"]).read_text(encoding="utf-8"))
    cues = [cue for line in lines if (cue := read_cue(line, doc))["end"] > 0 and cue["start"] < doc["duration"]]
    question = utils.longvideobench_doc_to_text(doc, lmms_eval_specific_kwargs)
    return f"{subtitle_text(cues)}\n{question}" if any(cue["text"].strip() for cue in cues) else question


def read_cue(line: dict[str, Any], doc: dict[str, Any]) -> dict[str, Any]:
    """A line of either kind of subtitle file, in seconds of the video."""
    shift = doc["starting_timestamp_for_subtitles"]
    if "timestamp" in line:
        (start, end), text = line["timestamp"], line["text"]
        end = end if isinstance(end, int | float) else shift + doc["duration"]  # the last line may have no end
    else:
        start, end = (utils.timestamp_to_seconds(line[name]) for name in ("start", "end"))
        text = line["line"]
    return {"start": max(start - shift, 0.0), "end": end - shift, "text": text}
