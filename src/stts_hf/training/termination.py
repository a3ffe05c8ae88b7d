"""SIGTERM, which schedulers send before they kill: finish the step, save, stop training.

transformers' `enable_jit_checkpoint` waits three seconds, saves in the middle of a step, after its random numbers were
drawn, and does not ask other processes, so a resumed run would differ from an uninterrupted one.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)


class TrainingTerminated(Exception):
    """SIGTERM stopped the training after a checkpoint was saved."""


class Termination(TrainerCallback):
    """Within `heard`, SIGTERM sets `requested`. Once all processes have `agreed`, the run saves and stops."""

    def __init__(self) -> None:
        self.requested = self.agreed = False
        self._reached: tuple[torch.Tensor, torch.Event | None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Handles SIGTERM, until the block ends."""
        self.requested = self.agreed = False
        self._reached = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, so SIGTERM ends it without saving.")
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self.requested = True  # no logging: the signal may interrupt a write

    def agree(self, requests: torch.Tensor) -> None:
        """Takes how many processes got SIGTERM, equal on all; the end of the step reads it from a copy on the host."""
        copy, is_on_host = requests.to("cpu", non_blocking=True), requests.device.type == "cpu"
        event = None if is_on_host else torch.accelerator.current_stream(requests.device).record_event()
        self._reached = copy, event

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._reached is not None:
            requests, event = self._reached
            if event is not None:
                event.synchronize()
            self.agreed = self.agreed or bool(requests)
        if self.agreed or (args.world_size == 1 and self.requested):
            self.agreed = True
            logger.warning(f"SIGTERM: saving at step {state.global_step} and ending.")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.agreed:  # the end of the step has saved
            control.should_save = control.should_evaluate = False
        return control


def prepare_workers(dataloader: DataLoader, collator: Callable[..., Any] | None = None) -> DataLoader:
    """Makes workers ignore SIGTERM, which Slurm sends to the whole process group, until their parent ends."""
    loader: DataLoader = getattr(dataloader, "base_dataloader", dataloader)
    loader.collate_fn = collator or loader.collate_fn
    if getattr(loader.worker_init_fn, "func", None) is not _ignore_sigterm:  # not yet, in an earlier evaluation
        loader.worker_init_fn = functools.partial(_ignore_sigterm, loader.worker_init_fn)
    return dataloader


def _ignore_sigterm(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
