"""How long a prompt takes: stock Molmo2, STTS that drops nothing, and STTS that drops."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stts_hf.benchmark.clocks import clock_of
from stts_hf.benchmark.stages import LANGUAGE_MODEL, TOTAL, VISION_TOWER, StageRecorder
from stts_hf.benchmark.stock import stock_twin
from stts_hf.cli.progress import progress_bar, stage


@dataclasses.dataclass(frozen=True)
class PrefillTimes:
    """Medians in milliseconds: the vision tower, the language model's pass over the prompt, and pixels to logits."""

    vision_tower: float
    language_model: float
    total: float


def time_against_stock(model: Any, inputs: Mapping[str, Any], ratio: float, repeats: int) -> dict[str, PrefillTimes]:
    """Times a prompt with stock Molmo2, with nothing dropped and with `ratio` dropped, each `repeats` times."""
    variants: dict[str, tuple[nn.Module, Mapping[str, Any]]] = {
        "stock Molmo2": (stock_twin(model), inputs),
        "STTS, none dropped": (model, {**inputs, "pruning_ratio": 0.0}),
    }
    if ratio > 0:
        variants[f"STTS, {ratio:.0%} dropped"] = (model, {**inputs, "pruning_ratio": ratio})
    passes = len(variants) * (repeats + 1)
    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        progress_bar(passes, "pass", "  Timing") as bar,
    ):
        return time_prefills(variants, repeats, on_pass=bar.update)


def time_prefills(
    variants: Mapping[str, tuple[nn.Module, Mapping[str, Any]]],
    repeats: int = 3,
    on_pass: Callable[[], object] = lambda: None,
) -> dict[str, PrefillTimes]:
    """
    Runs every variant's prompt `repeats` times after one warm-up. The variants take turns, so that a machine that slows
    down slows them all.

    Args:
        variants: name to model and the keyword arguments of its call.
        on_pass: called after each pass, `len(variants) * (repeats + 1)` times in all.
    """
    rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in variants}
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
            rounds[name].append(tuple(1000 * stages[stage] for stage in (VISION_TOWER, LANGUAGE_MODEL, TOTAL)))
            on_pass()
    return {
        name: PrefillTimes(*map(statistics.median, zip(*measured[1:], strict=True)))
        for name, measured in rounds.items()
    }


def print_times(times: Mapping[str, PrefillTimes]) -> None:
    """Prints the medians, each with its ratio to the first variant's."""
    print(f"\n{'median, ms':<22}{'vision tower':>20}{'LLM prefill':>20}{'pixels to logits':>20}")
    stock = dataclasses.astuple(next(iter(times.values())))
    for name, measured in times.items():
        cells = (
            f"{value:.1f} ({base / value:.2f}x)" if value > 0 else "-"
            for value, base in zip(dataclasses.astuple(measured), stock, strict=True)
        )
        print(f"{name:<22}" + "".join(f"{cell:>20}" for cell in cells))
