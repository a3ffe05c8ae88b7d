"""What a prompt costs by the stock model and by STTS, unpruned and pruned: tokens, cache, FLOPs, and times."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from stts_hf.benchmark.meters import COLUMNS, Clock, Cost, FlopClock, StageRecorder
from stts_hf.benchmark.models import stock_inputs, stock_twin
from stts_hf.cli.checkpoint_options import SMALL
from stts_hf.cli.progress import note, progress_bar, stage
from stts_hf.inference.generate import inputs_for, tensors_of
from stts_hf.keeping import KeepRule, rule_arguments
from stts_hf.wording import gigaflop, saved, speed, spread

STOCK = "stock model"
Variants = Mapping[str, tuple[KeepRule, str]]  # how many blocks stay and selector, by name


def time_prompts(
    model: PreTrainedModel, inputs: Mapping[str, Any], variants: Variants, repeats: int = 3
) -> dict[str, Cost]:
    """What stock and each variant cost: a warm-up that counts, then `repeats` rounds in which they take turns."""
    inputs = inputs_for(model, inputs)
    stock = stock_twin(model)
    as_stock = stock_inputs(stock, inputs)
    costs = {name: Cost() for name in (STOCK, *variants)}

    def run(name: str, clock: Clock) -> tuple[dict[str, float], Any]:
        timed, options, given = stock, dict[str, Any](), as_stock
        if name != STOCK:
            timed, given = model, inputs
            rule, model.config.vision_config.selector = variants[name]
            options = rule_arguments(rule)
        with StageRecorder(timed, clock) as recorder, torch.no_grad():
            output = timed(**given, **options, logits_to_keep=1, use_cache=True)
        return recorder.stages(), output.past_key_values

    with (
        stage(f"Timing {repeats} prompts of each variant, after a warm-up"),
        progress_bar(len(costs) * (repeats + 1), "pass") as bar,
    ):
        for name, cost in costs.items():
            clock = FlopClock()
            with clock.counter:
                stages, cache = run(name, clock)
            cost.flops = {column: int(stages[part]) for column, part in COLUMNS.items()}
            cost.tokens = int(cache.get_seq_length())
            cost.cache_bytes = sum(tensor.nbytes for layer in cache.layers for tensor in tensors_of(layer))
            bar.update()
        for name in [*costs] * repeats:
            stages, _ = run(name, Clock(model.device))
            for column, part in COLUMNS.items():
                costs[name].rounds[column].append(1000 * stages[part])
            bar.update()
    return costs


def print_times(costs: Mapping[str, Cost], num_parameters: int) -> None:
    """Prints what is certain (tokens, cache, FLOPs with the share that is saved), then the spread of times."""
    stock = next(iter(costs.values()))
    print(f"\n{'':<22}{'prompt tokens':>16}{'cache, KiB':>14}" + "".join(f"{f'GFLOP, {name}':>28}" for name in COLUMNS))
    for name, cost in costs.items():
        cells = f"{cost.tokens:>16,}{cost.cache_bytes / 1024:>14,.0f}"
        for column, flops in cost.flops.items():
            less = "" if cost is stock else saved(stock.flops[column], flops)
            cells += f"{gigaflop(flops) + (f' ({less})' if less else ''):>28}"
        print(f"{name:<22}{cells}")
    print(f"\n{'median, ms (spread)':<22}" + "".join(f"{column:>40}" for column in COLUMNS))
    for name, cost in costs.items():
        cells = ""
        for column, rounds in cost.rounds.items():
            beside = "" if cost is stock else f" {speed(stock.rounds[column], rounds)}"
            cells += f"{spread(rounds) + beside:>40}"
        print(f"{name:<22}{cells}")
    if num_parameters < SMALL:
        note("The model is too small for its times to count: they are mostly overhead. FLOPs and cache show the gain.")
