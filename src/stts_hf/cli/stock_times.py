"""Times of a prompt: by the stock model and by STTS, with nothing dropped and pruned."""

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from stts_hf.benchmark.meters import LANGUAGE_MODEL, TOTAL, VISION_TOWER, Clock, StageRecorder
from stts_hf.benchmark.models import stock_twin
from stts_hf.cli.progress import progress_bar, stage
from stts_hf.inference.generate import inputs_for
from stts_hf.keeping import KeepRule, in_words, rule_arguments

COLUMNS = {"vision tower": VISION_TOWER, "LLM prefill": LANGUAGE_MODEL, "pixels to logits": TOTAL}
STOCK = "stock model"
Variants = Mapping[str, tuple[KeepRule, str]]  # how many blocks stay and selector, by name


def compare_with_stock(rule: KeepRule, selector: str) -> Variants:
    """Returns STTS with nothing and with what a rule says dropped."""
    variants = {"STTS, none dropped": (KeepRule(0.0), selector), f"STTS, {in_words(rule)}": (rule, selector)}
    return variants if rule.ratio != 0 else dict([next(iter(variants.items()))])


def time_prompts(
    model: PreTrainedModel, inputs: Mapping[str, Any], variants: Variants, repeats: int = 3
) -> dict[str, list[float]]:
    """Medians in milliseconds, one for each of `COLUMNS`, of stock and each variant in turns, after a warm-up."""
    inputs = inputs_for(model, inputs)
    stock = stock_twin(model)
    rounds: dict[str, list[list[float]]] = {name: [] for name in (STOCK, *variants)}
    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        progress_bar(len(rounds) * (repeats + 1), "pass") as bar,
    ):
        for name in [*rounds] * (repeats + 1):
            timed, options = stock, dict[str, Any]()
            if name != STOCK:
                timed = model
                rule, model.config.vision_config.selector = variants[name]
                options = rule_arguments(rule)
            with StageRecorder(timed, Clock(model.device)) as recorder, torch.no_grad():
                timed(**inputs, **options, logits_to_keep=1, use_cache=True)
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
