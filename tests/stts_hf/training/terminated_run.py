"""A run to be sent SIGTERM: `python -m tests.stts_hf.training.terminated_run FOLDER STEPS WORKERS`.

Under `torchrun`'s environment variables, as one of several processes. Prints `step N` at the end of each step.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from stts_hf.training.termination import TrainingTerminated
from tests.stts_hf.training.runs import Rows, trainer
from tests.tiny import Part, Video


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)
        time.sleep(0.05)


def main(folder: str, steps: str, workers: str) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"max_steps": int(steps), "logging_steps": 1000, "dataloader_num_workers": int(workers)}
    rows: list[list[Part]] = [[3, Video(2), 4], [3, Video(3), 2]]  # all with video, so that DDP sees every weight used
    run = trainer(Path(folder), data=Rows(rows, length=4 * int(steps)), **options)
    run.add_callback(Report())
    os.setpgid(0, 0)
    try:
        run.train()
    except TrainingTerminated:
        PartialState().destroy_process_group()
        sys.exit(143)
    print("complete", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
