"""How long a prompt takes: stock Molmo2, STTS that drops nothing, and STTS that drops."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import nn

from stts_hf.benchmark.clocks import clock_of
from stts_hf.benchmark.stages import LANGUAGE_MODEL, TOTAL, VISION_TOWER, StageRecorder


@dataclasses.dataclass(frozen=True)
class PrefillTimes:
    """Medians in milliseconds: the vision tower, the language model's pass over the prompt, and pixels to logits."""

    vision_tower: float
    language_model: float
    total: float


def time_prefills(
    variants: Mapping[str, tuple[nn.Module, dict]],
    repeats: int = 3,
    on_pass: Callable[[], None] = lambda: None,
) -> dict[str, PrefillTimes]:
    """
    Runs every variant's prompt `repeats` times after one warm-up. The variants take turns, so that a machine that slows
    down slows them all.

    Args:
        variants: name to model and the keyword arguments of its call.
        on_pass: called after each pass, `len(variants) * (repeats + 1)` times in all.
    """
    rounds: dict[str, list[PrefillTimes]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, (model, arguments) in variants.items():
            recorder = StageRecorder(model, clock_of(next(model.parameters()).device))
            try:
                with torch.no_grad():
                    recorder.start()
                    model(**arguments, logits_to_keep=1, use_cache=True)
                    recorder.mark("end")
            finally:
                recorder.close()
            stages = recorder.prompt_stages()
            measured = (1000 * stages[stage] for stage in (VISION_TOWER, LANGUAGE_MODEL, TOTAL))
            rounds[name].append(PrefillTimes(*measured))
            on_pass()
    return {name: _median(measured[1:]) for name, measured in rounds.items()}


def _median(measured: list[PrefillTimes]) -> PrefillTimes:
    stages = zip(*map(dataclasses.astuple, measured), strict=True)
    return PrefillTimes(*(statistics.median(stage) for stage in stages))
