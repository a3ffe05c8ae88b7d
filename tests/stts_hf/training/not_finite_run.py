"""`torchrun .. -m tests.stts_hf.training.not_finite_run FOLDER`: process 1 of two has NaN in its second step."""

import sys
from pathlib import Path
from typing import Any

import torch

from tests.stts_hf.training.runs import Rows, trainer
from tests.tiny import Part, Video


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rows: list[list[Part]] = [[3, Video(2), 4]]
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    options["train_sampling_strategy"] = "sequential"
    run = trainer(Path(folder), data=Rows(rows, length=8), **options)

    def spoil(module, inputs, logits):
        return logits * torch.nan if run.args.process_index == 1 and run.state.global_step == 1 else None

    run.model.lm_head.register_forward_hook(spoil)
    run.train()


if __name__ == "__main__":
    main(sys.argv[1])
