"""A study in miniature: a base checkpoint of a few thousand weights, and a data set of a few clips."""

import json
from pathlib import Path
from typing import Any

from examples.study.distraction import Look
from examples.study.make_dataset import make_dataset
from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from tests.checkpoints import TINY
from tests.tiny import randomise

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "batch_size": 2,
    "warmup_steps": 0,
    "scorer_steps": 2,
    "answers_steps": 2,
    "num_masks": 4,
    "mask_rounds": 1,
    "seeds": (0, 1),
    "ratios": (0.8,),
}


def write_base(folder: Path) -> Path:
    """A checkpoint of the tiny one's kind, with fewer layers."""
    processor: Any = STTSProcessor.from_pretrained(TINY)
    processor.image_processor.max_crops = 1
    processor.save_pretrained(folder)
    contents = STTSConfig.from_pretrained(TINY).to_dict()
    config = STTSConfig(
        **contents
        | {
            "vision_config": contents["vision_config"] | {"num_hidden_layers": 5, "pruning_layer": 2},
            "adapter_config": contents["adapter_config"] | {"vision_feature_layer": [4, 3]},
            "text_config": contents["text_config"] | {"num_hidden_layers": 1},
        }
    )
    model = STTSForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def add_code(base: Path, ran: Path) -> None:
    """Makes the tokenizer of `base` a class of its own, whose import creates the file `ran`."""
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Foreign", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "foreign.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Foreign: ...\n")


def write_dataset(folder: Path, seed: int = 0, strength: float = 1.0) -> Path:
    """Of all kinds of clips, a few."""
    for _ in make_dataset(folder, {"train": 4, "test": 3, "validation": 3}, seed, Look(strength)):
        pass
    return folder


def study_command(folder: Path, dataset: Path, base: Path, *options: str) -> list[str]:
    """`run` of two seeds, of `SETTINGS`."""
    command = ["run", str(folder), "--dataset", str(dataset), "--base", str(base)]
    for name, value in SETTINGS.items():
        command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return [*command, *options]
