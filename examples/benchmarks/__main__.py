"""
Claims of the documentation, measured again from a checkout; each prints a page and writes it with its samples:

    python -m examples.benchmarks decode --output docs/benchmarks/decode      # 20 min on 2 CPU cores
    OMP_NUM_THREADS=1 python -m examples.benchmarks ask --repeats 2 --output docs/benchmarks/ask    # 5 min
    python -m examples.benchmarks training-free --repeats 2 --output docs/benchmarks/training-free          # 7 min
    OMP_NUM_THREADS=1 python -m examples.benchmarks budget --output docs/benchmarks/budget          # 10 min
    OMP_NUM_THREADS=1 python -m examples.benchmarks shortened --repeats 5 --output docs/benchmarks/shortened    # 4 min
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stts_hf.benchmark.measure import measure_cells
from stts_hf.benchmark.presets import PRESETS, Workload
from stts_hf.benchmark.report import check_folder, markdown, write_result
from stts_hf.cli.bench import command_line
from stts_hf.cli.options import count

from .asking import measure_questions
from .budget import measure_mixture
from .reading import measure_clip
from .shortened import measure_shortened
from .training_free import measure_methods

CLIPS = (3600.0, 32.0)  # seconds
# The smallest that are still mostly matrix products: a call each for ten questions takes ten times a prompt's seconds.
ASKED = Workload("inference", "molmo2-small-long", 64, (0.5,), text_tokens=16, timestamp_tokens=3, decode_tokens=8)
MIXED = (
    Workload("inference", "molmo2-small-long", 32, text_tokens=20, timestamp_tokens=5),
    Workload("inference", "qwen3-vl-small-long", 32, text_tokens=20, timestamp_tokens=5),
)


def cells(name: str, repeats: int, layers: list[int] | None) -> Iterator[dict[str, Any]]:
    if name == "decode":
        yield from (measure_clip(clip, repeats) for clip in CLIPS)
        return
    if name == "training-free":
        yield from measure_methods(torch.device("cpu"), repeats, layers)
        return
    if name == "shortened":
        yield from (measure_shortened(workload, repeats) for workload in PRESETS["qwen-more-small"].workloads)
        return
    if name == "budget":
        yield from (measure_mixture(workload, repeats) for workload in MIXED)
        return
    for workload in (ASKED, ASKED._replace(geometry="qwen3-vl-small-long", timestamp_tokens=1)):
        yield measure_questions(workload, workload.ratios[0], torch.device("cpu"), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what the documentation claims.")
    parser.add_argument(
        "name",
        choices=("decode", "ask", "training-free", "budget", "shortened"),
        help="decode: 64 frames of a file, beside transformers' PyAV reader; ask: ten questions about one video; "
        "training-free: cosine, EVS and random, in cost and in what they keep of what moves; "
        "budget: still and busy videos by one threshold, beside one ratio; "
        "shortened: Qwen3.5 and a mixture of experts, beside stock on the tokens that are left",
    )
    parser.add_argument("--pruning-layers", nargs="+", type=int, metavar="L", help="training-free: layers to compare")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="timed rounds (default: 3)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the result")
    arguments = parser.parse_args()
    check_folder(arguments.output)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measured = cells(arguments.name, arguments.repeats, arguments.pruning_layers)
    command = command_line("python -m examples.benchmarks")
    for result in measure_cells(arguments.name, measured, torch.device("cpu"), command):
        write_result(result, arguments.output)
    print(markdown(result), end="")


if __name__ == "__main__":
    main()
