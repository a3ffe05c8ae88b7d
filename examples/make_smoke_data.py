"""
Makes a few moving clips and rows about them: data to try a training on.

Usage: python -m examples.make_smoke_data FOLDER [CLIPS]
"""

import json
import sys
from pathlib import Path

from examples.clips.sample_clip import draw_sample_clip

QUESTIONS = {
    "What is moving?": "A ring.",
    "Which way does it move?": "To the right.",
    "What changes its colour?": "A square.",
}


def make_smoke_data(folder: Path | str, clips: int = 6) -> Path:
    """
    Writes `clips` clips of 3 to 5 seconds, `train.jsonl` with a row about each, and `unlabelled.jsonl` with their files
    alone. Returns the first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(clips):
        name = f"clip_{number:03d}.mp4"
        draw_sample_clip(folder / name, seconds=3 + number % 3, fps=8, size=(96 + 16 * (number % 2), 128))
        question, answer = list(QUESTIONS.items())[number % len(QUESTIONS)]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"clip-{number}", "videos": [name], "messages": messages})
    unlabelled = [{"videos": row["videos"]} for row in rows]
    for name, lines in (("unlabelled.jsonl", unlabelled), ("train.jsonl", rows)):
        file = folder / name
        file.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    return file


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(make_smoke_data(sys.argv[1], *map(int, sys.argv[2:])))
