"""
Measures `stts-hf predict` beside a script with a plain loop of `generate`, and two prompts a video beside one.

    OMP_NUM_THREADS=1 python -m tests.stts_hf.inference.measure_predictions

200 clips of 4 seconds, 240 x 426 pixels, H.264; stts-tiny, at most 16 frames, 8 new tokens. Each way is a process of
its own, timed from its start to its end, so imports and loading count; they take turns. Prints median and extremes of
ratios within a round, of whole processes and of answering alone.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


def predict(clips: Path, prompts: list[str]) -> Answered:
    with tempfile.TemporaryDirectory() as folder:
        rows, answers = Path(folder, "rows.jsonl"), Path(folder, "answers.jsonl")
        asked = [
            {"id": f"{clip.name} {place}", "video": str(clip), "prompt": prompt}
            for clip in sorted(clips.glob("*.mp4"))
            for place, prompt in enumerate(prompts)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
        options = ("--max-new-tokens", str(TOKENS), "--output", str(answers))
        printed = run("-m", "stts_hf.cli.main", "predict", str(rows), "--checkpoint", str(TINY), *options)
        found = [json.loads(line) for line in answers.read_text().splitlines()]
    said = re.search(r"rows in ([0-9.]+) s", printed)
    assert said, printed
    return float(said[1]), {Path(row["video"]).name: row["answer"] for row in found if row["id"].endswith(" 0")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure predictions.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    whole: dict[str, list[float]] = {name: [] for name in (LOOP, ONE, TWO)}
    answering: dict[str, list[float]] = {name: [] for name in whole}
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder)
        for number in range(4):
            write_sample_clip(clips / f"{number:04}.mp4", seconds=4 + number / 10, fps=25, size=(240, 426))
        for number in range(4, arguments.clips):
            shutil.copy(clips / f"{number % 4:04}.mp4", clips / f"{number:04}.mp4")
        ways: dict[str, Callable[[], Answered]] = {
            LOOP: lambda: loop(clips),
            ONE: lambda: predict(clips, [QUESTION]),
            TWO: lambda: predict(clips, [QUESTION, MORE]),
        }
        for _ in range(arguments.repeats):
            found = []
            for name, answer in ways.items():
                started = time.perf_counter()
                seconds, answers = answer()
                whole[name].append(time.perf_counter() - started)
                answering[name].append(seconds)
                found.append(answers)
            if found != found[:1] * 3:
                sys.exit("The ways give different answers")
    for what, times in (("whole processes", whole), ("answering alone", answering)):
        for above, below in ((LOOP, ONE), (TWO, ONE)):
            ratios = sorted(a / b for a, b in zip(times[above], times[below], strict=True))
            middle = statistics.median(ratios)
            print(f"{what}: {above} / {below}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
