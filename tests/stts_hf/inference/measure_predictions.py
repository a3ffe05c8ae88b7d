"""
Measures `stts-hf predict` beside a script with a plain loop of `generate`, and two prompts a video beside one.

    OMP_NUM_THREADS=1 python -m tests.stts_hf.inference.measure_predictions

200 clips of 4 seconds, 240 x 426 pixels, H.264; stts-tiny, at most 16 frames, 8 new tokens. Each way is a process of
its own, timed from its start to its end, so imports and loading count; they take turns. Prints JSON: seconds of every
round, and median and extremes of ratios within a round, of whole processes and of answering alone.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stts_hf.visualize.sample_clip import write_sample_clip
from tests.checkpoints import TINY

QUESTION, MORE = "What moves?", "Which colour is the ring, and where does it go?"
LOOP, ONE, TWO = "a plain loop of generate", "predict, one prompt a video", "predict, two prompts a video"
TOKENS = 8

# What README.md shows, for each clip.
SCRIPT = f"""
import json, sys, time
from pathlib import Path
from transformers import AutoModelForMultimodalLM, AutoProcessor

checkpoint, folder = sys.argv[1:]
processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
model = AutoModelForMultimodalLM.from_pretrained(checkpoint, trust_remote_code=True).eval()
started, answers = time.perf_counter(), {{}}
for clip in sorted(Path(folder).glob("*.mp4")):
    parts = [{{"type": "video", "path": str(clip)}}, {{"type": "text", "text": {QUESTION!r}}}]
    inputs = processor.apply_chat_template(
        [{{"role": "user", "content": parts}}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens={TOKENS}, do_sample=False)
    text = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers[clip.name] = text.strip()
print(json.dumps([time.perf_counter() - started, answers]))
"""

Answered = tuple[float, dict[str, str]]  # seconds of answering, and the first prompt's answer by clip


def run(*command: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def loop(clips: Path) -> Answered:
    seconds, answers = json.loads(run("-c", SCRIPT, str(TINY), str(clips)).splitlines()[-1])
    return seconds, answers


def predict(clips: Path, prompts: list[str], workers: int) -> Answered:
    with tempfile.TemporaryDirectory() as folder:
        rows, answers = Path(folder, "rows.jsonl"), Path(folder, "answers.jsonl")
        asked = [
            {"id": f"{clip.name} {place}", "video": str(clip), "prompt": prompt}
            for clip in sorted(clips.glob("*.mp4"))
            for place, prompt in enumerate(prompts)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
        options = ("--max-new-tokens", str(TOKENS), "--workers", str(workers), "--output", str(answers))
        printed = run("-m", "stts_hf.cli.main", "predict", str(rows), "--checkpoint", str(TINY), *options)
        found = [json.loads(line) for line in answers.read_text().splitlines()]
    said = re.search(r"rows in ([0-9.]+) s", printed)
    assert said, printed
    return float(said[1]), {Path(row["video"]).name: row["answer"] for row in found if row["id"].endswith(" 0")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure predictions.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder)
        kinds = 4
        for number in range(arguments.clips):
            clip = clips / f"{number:04}.mp4"
            if number < kinds:
                write_sample_clip(clip, seconds=4 + number / 10, fps=25, size=(240, 426))
            else:
                shutil.copy(clips / f"{number % kinds:04}.mp4", clip)
        ways: dict[str, Callable[[], Answered]] = {
            LOOP: lambda: loop(clips),
            ONE: lambda: predict(clips, [QUESTION], arguments.workers),
            TWO: lambda: predict(clips, [QUESTION, MORE], arguments.workers),
        }
        whole: dict[str, list[float]] = {name: [] for name in ways}
        answering: dict[str, list[float]] = {name: [] for name in ways}
        expected: dict[str, str] = {}
        for repeat in range(arguments.repeats):
            names = list(ways)
            for name in names[repeat % 3 :] + names[: repeat % 3]:
                started = time.perf_counter()
                seconds, answers = ways[name]()
                whole[name].append(round(time.perf_counter() - started, 2))
                answering[name].append(round(seconds, 2))
                expected = expected or answers
                if answers != expected:
                    sys.exit(f"{name}: other answers than before")
                print(f"{name}: {whole[name][-1]} s, {answering[name][-1]} s of them answering", file=sys.stderr)

    def ratio(seconds: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
        found = sorted(a / b for a, b in zip(seconds[above], seconds[below], strict=True))
        return {"median": round(statistics.median(found), 2), "least": round(found[0], 2), "most": round(found[-1], 2)}

    result: dict[str, Any] = {"clips": arguments.clips, "workers": arguments.workers, "cores": os.cpu_count()}
    for name, times in (("whole processes", whole), ("answering alone", answering)):
        ratios = {"speed-up over the loop": ratio(times, LOOP, ONE), "two prompts over one": ratio(times, TWO, ONE)}
        result[name] = {"seconds": times} | ratios
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
