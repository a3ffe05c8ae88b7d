"""
Part (b): the paper's shapes, Qwen3-VL-4B's and other backbones', with random weights, against stock and the FLOP ideal.

    python -m examples.gpu.shapes molmo2 --device cuda --size full docs/benchmarks/gpu-molmo2
    python -m examples.gpu.shapes released-qwen3_5 --device cuda --size full docs/benchmarks/gpu-released-qwen3_5
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from examples.benchmarks.training_free import EVS, measure_method
from stts_hf.benchmark.measure import measure_cells, measure_workloads
from stts_hf.benchmark.models import build_models
from stts_hf.benchmark.presets import PRESETS, Workload
from stts_hf.benchmark.report import write_result

from .backbones import RATIOS, released_workloads
from .options import parse

TINY = {"molmo2": PRESETS["tiny"].workloads[2]._replace(batch=1), "qwen": PRESETS["tiny"].workloads[4]}
# Bytes of the GPU that a training step of stock Molmo2-4B fits into with its vocabulary of 151,936, whose logits take
# most of it. On a smaller one the vocabulary is a tenth of that.
WHOLE_VOCABULARY = 120e9


def workloads(name: str, size: str, memory: float) -> list[Workload]:
    """Of a part, smaller ones first: what was measured when time is up stays."""
    backbone, _, kind = name.partition("-")
    if backbone == "released":
        return released_workloads(kind, size, memory)
    backend = "flex_attention" if kind == "flex" else "sdpa"
    if size == "tiny":  # both in one process
        return [TINY[backbone]._replace(mode=mode, ratios=(0.0, 0.5)) for mode in ("inference", "training")]
    modes = ("inference", "training") if kind == "flex" else (kind or "inference",)
    preset = PRESETS["paper" if backbone == "molmo2" else "qwen"]
    found = [it._replace(ratios=RATIOS) for it in preset.workloads if it.mode in modes and it.backend == backend]
    if memory < WHOLE_VOCABULARY:
        short = {"molmo2-4b": "molmo2-4b-short"}
        found = [
            it._replace(geometry=short.get(it.geometry, it.geometry)) if it.mode == "training" else it for it in found
        ]
    return found


def cells(name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, repeats = arguments.device, 1 if arguments.size == "tiny" else 3
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0.0
    if name != "evs":
        if not (found := workloads(name, arguments.size, memory)):
            raise SystemExit(f"Left out: no released size fits {memory / 2**30:.0f} GiB")
        yield from measure_workloads(found, device, repeats)
        return
    workload = PRESETS["qwen"].workloads[0]._replace(ratios=(0.3, 0.5, 0.7))
    if arguments.size == "tiny":
        workload = TINY["qwen"]._replace(ratios=(0.5,))
    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
    for method in ("cosine", EVS):
        yield measure_method(method, workload, models, device, repeats)


def until(measured: Iterable[dict[str, Any]], seconds: float) -> Iterator[dict[str, Any]]:
    """The cells that begin within so many seconds."""
    ends = time.monotonic() + seconds
    for cell in measured:
        yield cell
        if time.monotonic() > ends:
            return


def main() -> None:
    name = sys.argv.pop(1)
    arguments = parse(__doc__)
    command = f"python -m examples.gpu.shapes {name} --device {arguments.device} --size {arguments.size}"
    measured = until(cells(name, arguments), arguments.seconds)
    for result in measure_cells(f"gpu-{name}", measured, arguments.device, command):
        write_result(result, arguments.folder)


if __name__ == "__main__":
    main()
