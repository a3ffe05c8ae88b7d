"""A process to be killed while it saves. A fork server imports this once, builds the model and forks for each save:
nothing here starts threads, which would not survive the fork."""

import os
from pathlib import Path

import torch

from stts_hf import STTSForConditionalGeneration
from tests.tiny import tiny_config

torch.set_num_threads(1)
model = STTSForConditionalGeneration(tiny_config())


def save(folder: Path, value: float, shards: str, die_after: int | None = None) -> None:
    """Saves the model with every weight at `value`; dies after `die_after` files were moved into place."""
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
    model.save_pretrained(folder, max_shard_size=shards)
