"""How long a prompt takes: the stock model, STTS that drops nothing, and STTS that drops."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from stts_hf.benchmark.meters import LANGUAGE_MODEL, TOTAL, VISION_TOWER, Clock, StageRecorder
from stts_hf.benchmark.models import stock_twin
from stts_hf.cli.progress import progress_bar, stage
from stts_hf.wording import percent

COLUMNS = {"vision tower": VISION_TOWER, "LLM prefill": LANGUAGE_MODEL, "pixels to logits": TOTAL}
Variants = Mapping[str, tuple[PreTrainedModel, Mapping[str, Any]]]


def compare_with_stock(model: PreTrainedModel, inputs: Mapping[str, Any], ratio: float) -> Variants:
    """What to time: the stock model, STTS with nothing and with `ratio` dropped, each with a call's arguments."""
    variants = {
        "stock model": (stock_twin(model), inputs),
        "STTS, none dropped": (model, {**inputs, "pruning_ratio": 0.0}),
        f"STTS, {percent(ratio)} dropped": (model, {**inputs, "pruning_ratio": ratio}),
    }
    return variants if ratio else dict(list(variants.items())[:2])


def time_prompts(
    variants: Variants, repeats: int = 3, before: Callable[[str], object] = lambda name: None
) -> dict[str, list[float]]:
    """
    Runs every variant's prompt `repeats` times after one warm-up, the variants in turn, so that a machine that slows
    down slows them all. before: called with a variant's name before its prompt. Returns each variant's medians in
    milliseconds, one for each of `COLUMNS`.
    """
    rounds: dict[str, list[list[float]]] = {name: [] for name in variants}
    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        progress_bar(len(variants) * (repeats + 1), "pass", "  Timing") as bar,
    ):
        for _ in range(repeats + 1):
            for name, (model, arguments) in variants.items():
                before(name)
                with StageRecorder(model, Clock(model.device)) as recorder, torch.no_grad():
                    model(**arguments, logits_to_keep=1, use_cache=True)
                stages = recorder.stages()
                rounds[name].append([1000 * stages[column] for column in COLUMNS.values()])
                bar.update()
    return {name: list(map(statistics.median, zip(*found[1:], strict=True))) for name, found in rounds.items()}


def print_times(times: Mapping[str, list[float]]) -> None:
    """Prints the medians, each with its ratio to the first variant's."""
    print(f"\n{'median, ms':<22}" + "".join(f"{column:>20}" for column in COLUMNS))
    stock = next(iter(times.values()))
    for name, measured in times.items():
        cells = (
            f"{ours:.1f} ({base / ours:.2f}x)" if ours else "-" for ours, base in zip(measured, stock, strict=True)
        )
        print(f"{name:<22}" + "".join(f"{cell:>20}" for cell in cells))
