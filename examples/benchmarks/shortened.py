"""STTS beside the stock language model on as many tokens as STTS leaves: what the drop itself costs."""

from typing import Any

import torch

from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import Runner, take_turns
from stts_hf.benchmark.meters import LANGUAGE_MODEL, TOTAL, Clock, FlopClock, peak_memory
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import Workload


@torch.no_grad()
def measure_shortened(workload: Workload, repeats: int) -> dict[str, Any]:
    """
    Reads a prompt into a cache, in turns: the stock model, STTS at each ratio, and for each ratio the stock language
    model with its head on random embeddings of the length that STTS leaves. Returns a cell of the result.
    """
    device = torch.device("cpu")
    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
    configure(models, workload, workload.backend)
    runner, stock = Runner(workload, models, workload_inputs(workload, models[0].config, device)), models[1]
    variants: list[dict[str, Any]] = [
        {"name": name, "pruning_ratio": ratio, "status": "ok", "tokens": runner.count_tokens(ratio or 0.0)}
        for name, ratio in [("stock", None), *((f"{ratio:g}", ratio) for ratio in workload.ratios)]
    ]
    variants += [one | {"name": f"stock on {one['tokens']} tokens", "alone": True} for one in variants[1:]]

    def read_text(length: int) -> None:
        width = stock.config.text_config.hidden_size
        states = stock.model.language_model(inputs_embeds=torch.randn(1, length, width), use_cache=True)
        stock.lm_head(states.last_hidden_state[:, -1:])

    def measure(variant: dict[str, Any], clock: Clock) -> dict[str, float]:
        """What each stage takes, by a clock."""
        if not variant.get("alone"):
            return runner.run(variant["pruning_ratio"], clock)
        started = clock.read()
        read_text(variant["tokens"])
        return dict.fromkeys((LANGUAGE_MODEL, TOTAL), clock.read() - started)

    def run(variant: dict[str, Any]) -> None:
        for stage, seconds in measure(variant, Clock(device, of_processor=True)).items():
            variant["stages"][stage]["seconds"].append(seconds)

    def warm_up(variant: dict[str, Any]) -> None:
        clock = FlopClock()
        with clock.counter:
            flops, variant["peak_memory"] = peak_memory(lambda: measure(variant, clock), device)
        variant["stages"] = {stage: {"flops": count, "seconds": []} for stage, count in flops.items()}

    title = f"{workload.title}, processor time, beside stock on the tokens that are left"
    take_turns(title, variants, repeats, warm_up, run)
    return {"title": title, "status": "ok", "variants": variants}
