"""Data and configurations for tests that train the tiny checkpoint: clips that are shown as 2 frames."""

import json
from pathlib import Path
from typing import Any

from stts_hf.cli.main import main
from tests.checkpoints import TINY
from tests.clips import write_clip

CONFIG = """\
model_name_or_path: {model}
train_data: {train}
num_frames: 2
learning_rates:
  scorer: 1e-3
output_dir: {output}
max_steps: 1
logging_steps: 1
lr_scheduler_type: constant
per_device_train_batch_size: 2
use_cpu: true
disable_tqdm: true
seed: 0
"""
CHANGE = "scorer_target: change\n"  # of every run that names no other; stts-tiny's scorer learned from answers


def row(number: int, **columns: Any) -> dict[str, Any]:
    """A row about clip `number`."""
    messages = [{"role": "user", "content": "What moves?"}, {"role": "assistant", "content": f"Number {number}."}]
    return {"id": f"row-{number}", "messages": messages, "videos": [f"clip_{number}.mp4"]} | columns


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder / name


def write_data(folder: Path, clips: int = 3) -> Path:
    """Clips and a row about each; returns the JSONL file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(clips):
        write_clip(folder / f"clip_{number}.mp4", 10 + 2 * number, fps=10)
    return write_rows(folder, [row(number) for number in range(clips)])


def write_config(folder: Path, train: Path, output: Path, *, model: Path = TINY, more: str = "") -> Path:
    """A configuration of one step; `more` goes behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    target = "" if "scorer_target" in more else CHANGE
    file.write_text(CONFIG.format(model=model, train=train, output=output) + target + more)
    return file


def train(config: Path, *arguments: str) -> int:
    """Runs `stts-hf train` in this process."""
    return main(["train", str(config), *arguments])
