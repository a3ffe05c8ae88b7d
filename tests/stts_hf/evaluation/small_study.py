"""A study in miniature: a base checkpoint of a few thousand weights, and a data set of a few clips."""

from pathlib import Path
from typing import Any

from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from stts_hf.evaluation.make_dataset import FRAMES_LOOKED_AT, MAX_FPS, make_dataset
from tests.checkpoints import TINY
from tests.tiny import randomise

SIZE = {"height": 48, "width": 48}  # 12 x 12 patches, 4 x 4 blocks: the grid in which `make_dataset` says what moves


def write_base(folder: Path) -> Path:
    """A checkpoint of the tiny one's kind, with smaller frames and fewer layers."""
    processor: Any = STTSProcessor.from_pretrained(TINY)
    for part in (processor.video_processor, processor.image_processor):
        part.size = SIZE
    processor.image_processor.max_crops = 1
    processor.video_processor.num_frames = FRAMES_LOOKED_AT
    processor.video_processor.max_fps = MAX_FPS
    processor.save_pretrained(folder)
    config = STTSConfig.from_pretrained(TINY)
    contents = config.to_dict()
    small = {"image_size": [48, 48], "num_hidden_layers": 5, "num_position_embeddings": 144, "pruning_layer": 2}
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


def write_dataset(folder: Path, seed: int = 0) -> Path:
    """Of all kinds of clips, a few."""
    for _ in make_dataset(folder, {"train": 4, "test": 6}, seed):
        pass
    return folder


def study_command(folder: Path, dataset: Path, base: Path, *options: str) -> list[str]:
    """`stts-hf study` of two methods and seeds, of one step each."""
    return [
        *("study", str(folder), "--dataset", str(dataset), "--base", str(base)),
        *(
            "--steps",
            "2",
            "--batch-size",
            "2",
            "--warmup-steps",
            "0",
            "--scorer-steps",
            "3",
            "--seeds",
            "0",
            "1",
            "--ratios",
            "0.5",
        ),
        *options,
    ]
