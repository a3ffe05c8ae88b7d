"""A process to be killed while it saves a model or a processor. A fork server imports this once, builds both and forks
for each save: nothing here starts threads, which would not survive the fork."""

import os
from pathlib import Path

import torch

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from tests.checkpoints import TINY
from tests.tiny import tiny_config

torch.set_num_threads(1)
model = STTSForConditionalGeneration(tiny_config())
processor = STTSProcessor.from_pretrained(TINY)


def save(folder: Path, value: int, shards: str | None, die_after: int | None = None) -> None:
    """
    Saves the model with every weight at `value`, or, where `shards` is None, the processor with `value` in each of its
    files; dies after `die_after` files were moved into place.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    if die_after is not None:
        replace = os.replace
        moved: list[str] = []

        def replace_or_die(source, destination):
            if len(moved) == die_after:
                os._exit(9)
            moved.append(destination)
            replace(source, destination)

        os.replace = replace_or_die  # type: ignore[assignment]
    if shards is not None:
        model.save_pretrained(folder, max_shard_size=shards)
        return
    processor.video_processor.num_frames = value
    processor.chat_template = str(value)
    processor.tokenizer.model_max_length = value
    processor.tokenizer.add_tokens(f"<value {value}>")
    processor.save_pretrained(folder)
