"""
What a GPU is for, in one command; `make gpu` calls it from the root of a checkout. docs/benchmarks/on_a_gpu.md says
what it measures.

    python -m examples.gpu --device cuda --hours 0.5
    python -m examples.gpu --device cpu --size tiny
"""

import argparse
import datetime
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .backbones import CONFIGS, is_released, lacking, sizes_of
from .options import SIZES
from .page import left_out, page, wrong
from .runner import Part, read_results, run_parts

LIMIT = 530.0  # seconds of a part, under nine minutes
ROOT = Path(__file__).resolve().parents[2]
WITH_PARTS = ("molmo2", "qwen3_vl")  # whose sizes are measured in parts of their own
BENCHMARKS, ELSEWHERE = ROOT / "docs" / "benchmarks", ROOT / "outputs" / "gpu"
ENVIRONMENT = {
    # What was carried to a machine without network stays within reach.
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def list_parts(device: str, size: str) -> list[Part]:
    """All parts, in the order of what is worth most."""
    on_cuda = "" if device == "cuda" else "a kernel for CUDA"
    no_vllm = "" if has_vllm() else "vLLM is not installed"
    both = ", prompt and training step" if size == "tiny" else ", prompt"
    table: list[tuple[str, str, str, list[str], str]] = [
        ("kernels", "a", "attention kernels against float32 on the CPU", ["kernels"], ""),
        *(
            (f"paths-{it}", "a", f"{it} by every path against float32 on the CPU", ["paths", it], lacking(it))
            for it in CONFIGS
        ),
        ("molmo2", "b", f"Molmo2-4B at the paper's shapes{both}", ["shapes", "molmo2"], ""),
        ("molmo2-training", "b", "the same, training step", ["shapes", "molmo2-training"], ""),
        ("qwen", "b", f"Qwen3-VL-4B{both}", ["shapes", "qwen"], ""),
        ("qwen-training", "b", "Qwen3-VL-4B, training step", ["shapes", "qwen-training"], ""),
        ("evs", "b", "Qwen3-VL beside EVS, in transformers", ["shapes", "evs"], ""),
        *(
            (
                f"released-{it}",
                "b",
                f"{it} at released sizes, prompt and training step",
                ["shapes", f"released-{it}"],
                "",
            )
            for it in CONFIGS
            if it not in WITH_PARTS and any(map(is_released, sizes_of(it)))
        ),
        ("molmo2-flex", "b", "Molmo2-4B with flex attention", ["shapes", "molmo2-flex"], on_cuda),
        ("predict", "c", "throughput of predict", ["predict"], ""),
        ("study", "d", "the study, one seed", ["study"], ""),
        ("vllm", "e", "Qwen3-VL in vLLM, beside EVS", ["serving"], no_vllm),
    ]
    options = ["--device", device, "--size", size]
    return [
        Part(
            name, letter, about, [sys.executable, "-m", f"examples.gpu.{words[0]}", *words[1:], *options], LIMIT, lacks
        )
        for name, letter, about, words, lacks in table
        if size == "full" or not name.endswith("-training")
    ]


def has_vllm() -> bool:
    return Path(".venv-vllm-gpu/bin/python").exists() or importlib.util.find_spec("vllm") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where a part failed, or a path computes something else."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpu", description="Checks and measures on a GPU.")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: every part once, to see that it runs")
    parser.add_argument("--hours", type=float, default=1.5, help="bound of all parts together (default: 1.5)")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="some of them")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of gpu-* and gpu.md (default: docs/benchmarks)")
    arguments = parser.parse_args(argv)
    has_cuda = torch.cuda.is_available()
    device = arguments.device if arguments.device != "auto" else "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        parser.error(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; DEVICE=cpu SIZE=tiny runs without"
        )
    if device == "cpu" and arguments.size == "full":
        parser.error("a CPU takes hours for sizes of 4B: SIZE=tiny")
    parts = list_parts(device, arguments.size)
    if unknown := set(arguments.parts or ()) - {part.name for part in parts}:
        parser.error(f"--parts: {sorted(unknown)[0]!r} is none of {', '.join(part.name for part in parts)}")
    parts = [part for part in parts if not arguments.parts or part.name in arguments.parts]
    folder = (arguments.output or (BENCHMARKS if arguments.size == "full" else ELSEWHERE)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Tiny figures mean nothing, so parts may share the cores, one thread each: two threads of each would fight.
    at_once, threads = (2, {"OMP_NUM_THREADS": "1"}) if device == "cpu" else (1, {})
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU; figures of this size mean nothing"
    if device == "cuda" and (others := gpus_of(read_results(parts, folder)) - {where}):
        parser.error(
            f"{folder} holds results of {others.pop()}, this is {where}: RESULTS=outputs/mine writes elsewhere"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the parts as Ctrl-C does
    outcomes = run_parts(parts, folder, 3600 * arguments.hours, ENVIRONMENT | threads, note, at_once)
    results = read_results(parts, folder)
    about = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}, {device}, size {arguments.size}: {where}."
    (folder / "gpu.md").write_text(page(outcomes, results, about))
    print((folder / "gpu.md").read_text())
    note(f"{folder / 'gpu.md'}: {len(left_out(outcomes, results))} left out, {len(wrong(outcomes, results))} failed")
    return 1 if wrong(outcomes, results) else 0


def gpus_of(results: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names of the GPUs that results were measured on."""
    return {it.get("machine", {}).get("gpu") or it["device"].removeprefix("cuda: ") for it in results.values()}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
