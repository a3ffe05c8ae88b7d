"""A study in miniature: a base checkpoint of a few thousand weights, and a data set of a few clips, both made in a second."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from tests.checkpoints import TINY
from tests.clips import write_clip
from tests.tiny import randomise

SIZE = {"height": 36, "width": 36}  # 9 x 9 patches, 3 x 3 blocks
FRAMES = 2
COLOURS = ("red", "green", "blue")
TYPES = {"direction": "motion", "colour": "detail", "what-came-first": "long"}


def write_base(folder: Path) -> Path:
    """A checkpoint of the tiny one's kind, with smaller frames and fewer layers."""
    processor: Any = STTSProcessor.from_pretrained(TINY)
    for part in (processor.video_processor, processor.image_processor):
        part.size = SIZE
    processor.image_processor.max_crops = 1
    processor.video_processor.num_frames = FRAMES
    processor.save_pretrained(folder)
    config = STTSConfig.from_pretrained(TINY)
    contents = config.to_dict()
    small = {"image_size": [36, 36], "num_hidden_layers": 5, "num_position_embeddings": 81, "pruning_layer": 2}
    config = STTSConfig(
        **contents
        | {
            "vision_config": contents["vision_config"] | small,
            "adapter_config": contents["adapter_config"] | {"vision_feature_layer": [4, 3]},
            "text_config": contents["text_config"] | {"num_hidden_layers": 1},
        }
    )
    model = STTSForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def write_dataset(folder: Path, clips: int = 3, version: int = 1) -> Path:
    """Clips with a conversation about each for training, others with questions of three types, and an image."""
    (folder / "videos").mkdir(parents=True)
    (folder / "motion").mkdir()
    train, test, motion = [], [], {}
    for number in range(clips):
        clip = f"train-{number:05d}"
        write_clip(folder / "videos" / f"{clip}.mp4", 10 + number, fps=10)
        messages = [
            {"role": role, "content": text}
            for colour in COLOURS[:2]
            for role, text in (("user", f"Is it {colour}?"), ("assistant", "yes" if colour == "red" else "no"))
        ]
        train.append({"id": clip, "videos": [f"videos/{clip}.mp4"], "messages": messages})
        clip = f"test-{number:05d}"
        write_clip(folder / "videos" / f"{clip}.mp4", 12 + number, fps=10)
        for kind, group in TYPES.items():
            row = {"id": f"{clip}-{kind}", "clip": clip, "videos": [f"videos/{clip}.mp4"], "type": kind, "group": group}
            test.append(row | {"question": f"Which {kind}?", "options": list(COLOURS), "answer": COLOURS[number % 3]})
        motion[clip] = np.zeros((FRAMES, 9, 9), dtype=bool)
        motion[clip][:, 3:6, number : number + 2] = True
    Image.new("RGB", (36, 36), (200, 0, 0)).save(folder / "picture.png")
    row = {"id": "test-picture", "clip": "picture", "images": ["picture.png"], "type": "picture", "group": "image"}
    test.append(row | {"question": "Which colour?", "answer": "red"})
    for name, rows in (("train_conversations", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.savez(folder / "motion" / "test.npz", **motion)
    chance = dict.fromkeys(TYPES, 1 / 3) | {"picture": 0.0}
    description = {"format": version, "seed": 0, "splits": {"train": {"clips": clips}}, "chance": chance}
    (folder / "dataset.json").write_text(json.dumps(description | {"text_only": chance}))
    return folder


def study_command(folder: Path, dataset: Path, base: Path, *options: str) -> list[str]:
    """`stts-hf study` of two methods and seeds, of one step each."""
    return [
        *("study", str(folder), "--dataset", str(dataset), "--base", str(base)),
        *("--steps", "2", "--batch-size", "2", "--warmup-steps", "0", "--seeds", "0", "1"),
        *options,
    ]


