"""
Measures `stts-hf predict` beside a plain loop of `generate`, and two prompts a video beside one.

    OMP_NUM_THREADS=1 python -m tests.stts_hf.inference.measure_predictions

200 clips of 4 seconds, 240 x 426 pixels, H.264; stts-tiny, at most 16 frames, 8 new tokens. All ways take turns,
each timed from its first call to its last answer, so what processes take to start counts. Prints JSON: seconds of every
round, and median and extremes of two ratios within a round.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stts_hf.inference.predicting import Predictor
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.checkpoints import TINY, messages

QUESTION, MORE = "What moves?", "Which colour is the ring, and where does it go?"
LOOP, ONE, TWO = "a plain loop of generate", "predict, one prompt a video", "predict, two prompts a video"


def plain_loop(model: Any, processor: Any, clips: list[Path], tokens: int) -> list[str]:
    """What README.md shows, for each clip."""
    answers = []
    for clip in clips:
        inputs = processor.apply_chat_template(
            messages(clip), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        answers.append(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure predictions.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    tokens = 8
    predictor = Predictor(str(TINY), max_new_tokens=tokens, num_workers=arguments.workers)
    with tempfile.TemporaryDirectory() as folder:
        kinds = [Path(folder, f"kind{kind}.mp4") for kind in range(4)]
        for kind, path in enumerate(kinds):
            write_sample_clip(path, seconds=4 + kind / 10, fps=25, size=(240, 426))
        clips = [Path(folder, f"{number}.mp4") for number in range(arguments.clips)]
        for number, clip in enumerate(clips):
            shutil.copy(kinds[number % len(kinds)], clip)

        def predict(prompts: list[str]) -> list[str]:
            rows = [
                {"id": f"{clip} {place}", "video": str(clip), "prompt": prompt}
                for clip in clips
                for place, prompt in enumerate(prompts)
            ]
            answers = {row["id"]: row["answer"] for row in predictor.predict(rows)}
            return [answers[row["id"]] for row in rows]

        ways: dict[str, Callable[[], list[str]]] = {
            LOOP: lambda: plain_loop(predictor.model, predictor.processor, clips, tokens),
            ONE: lambda: predict([QUESTION]),
            TWO: lambda: predict([QUESTION, MORE]),
        }
        expected = plain_loop(predictor.model, predictor.processor, kinds, tokens)  # warms up, too
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(arguments.repeats):
            names = list(ways)
            for name in names[repeat % 3 :] + names[: repeat % 3]:
                started = time.perf_counter()
                answers = ways[name]()
                seconds[name].append(round(time.perf_counter() - started, 2))
                first = answers[:: 2 if name == TWO else 1]
                if any(answer != expected[number % len(kinds)] for number, answer in enumerate(first)):
                    sys.exit(f"{name}: other answers than one by one")
                print(f"{name}: {seconds[name][-1]} s", file=sys.stderr, flush=True)

    def ratio(above: str, below: str) -> dict[str, float]:
        found = sorted(a / b for a, b in zip(seconds[above], seconds[below], strict=True))
        return {"median": round(statistics.median(found), 2), "least": round(found[0], 2), "most": round(found[-1], 2)}

    result = {"clips": arguments.clips, "workers": arguments.workers, "cores": os.cpu_count(), "seconds": seconds}
    ratios = {"speed-up over the loop": ratio(LOOP, ONE), "two prompts over one": ratio(TWO, ONE)}
    json.dump(result | ratios, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
