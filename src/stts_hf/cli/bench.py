"""`stts-hf bench`: compares STTS with the stock model and writes the result."""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stts_hf.benchmark.presets import PRESETS, find_preset, vary
from stts_hf.cli.errors import CommandError, refused
from stts_hf.cli.options import add_options, check_writable, count, device_name
from stts_hf.cli.progress import note
from stts_hf.selectors import SELECTORS
from stts_hf.wording import share

DEFAULT_PRESET = "tiny"
OUTPUTS = Path("outputs", "bench")  # default folder of every other preset
# Environment variables that affect measurements.
TUNING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")


# Option: the workload's field, and how to parse its values.
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "modes": ("mode", {"choices": ("tower", "inference", "training")}),
    "frames": ("frames", {"type": count, "metavar": "T", "help": "frames of each video"}),
    "ratios": ("ratios", {"type": share, "metavar": "K", "help": "pruning ratios, 0 to 1"}),
    "batches": ("batch", {"type": count, "metavar": "B", "help": "rows, each with one video"}),
    "selectors": ("selector", {"choices": SELECTORS}),
    "pruning_layers": ("pruning_layer", {"type": int, "metavar": "L", "help": "ViT layers after which blocks drop"}),
    "backends": ("backend", {"choices": ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")}),
    "dtypes": ("dtype", {"choices": ("float32", "bfloat16", "float16")}),
    "clocks": ("clock", {"choices": ("wall", "processor"), "help": "processor: for one thread on a busy CPU"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, table={"preset": (PRESETS, DEFAULT_PRESET, "NAME", "what to measure; see --list")})
    parser.add_argument("--list", action="store_true", help="print the presets with their run times, and exit")
    output = "write result.json and README.md there (default: outputs/bench/PRESET; tiny only prints)"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=output)
    parser.add_argument("--render", action="store_true", help="only rewrite the page of the result in --output")
    axes = parser.add_argument_group("values in place of the preset's; every combination is measured")
    for name, (_, argument) in AXES.items():
        axes.add_argument(f"--{name.replace('_', '-')}", nargs="+", **argument)
    parser.add_argument("--repeats", type=count, metavar="N", help="timed rounds of each workload (default: 3 or 4)")
    parser.add_argument("--device", type=device_name, default="auto", help="auto (default), cpu, cuda, cuda:1, ...")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if nothing could be measured; raises `CommandError` for a user error."""
    if arguments.list:
        for preset in PRESETS.values():
            print(f"{preset.name:<17}{preset.help}\n{'':<17}takes {preset.takes}")
        return 0
    from stts_hf.benchmark.report import markdown, read_result, why_nothing_measured, write_page, write_result

    with refused():
        if arguments.render:
            if arguments.output is None:
                raise CommandError("--render needs --output, the folder of the result")
            check_writable("--output", arguments.output)
            write_page(read_result(arguments.output), arguments.output)
            return 0
        results, folder = prepare(arguments)
    for result in results:
        if folder is not None:
            write_result(result, folder)
    print(markdown(result), end="")
    if problem := why_nothing_measured(result):
        note(f"stts-hf bench: error: nothing could be measured; {problem}")
        return 1
    return 0


def prepare(arguments: argparse.Namespace) -> tuple[Iterator[dict[str, Any]], Path | None]:
    """Checks all arguments. Returns the results, to be measured (see `measure_cells`), and the folder for them."""
    from stts_hf.benchmark.measure import check_runnable, measure_cells, measure_workloads
    from stts_hf.benchmark.report import check_folder
    from stts_hf.checkpoints.loading import choose_device

    with refused("--"):
        device = choose_device(arguments.device)
    axes = {field: getattr(arguments, name) for name, (field, _) in AXES.items()}
    if axes["ratios"]:
        axes["ratios"] = [tuple(sorted(set(axes["ratios"])))]  # all of them in one workload
    preset = find_preset(arguments.preset, on_gpu=device.type == "cuda")
    preset = vary(preset, axes.pop("mode"), arguments.repeats, **axes)
    check_runnable(preset, device)
    folder = arguments.output or (None if preset.name == DEFAULT_PRESET else unused(OUTPUTS / preset.name))
    if folder is not None:
        check_writable("--output", folder)
        check_folder(folder)
        note(f"stts-hf bench: writes to {folder}")
    cells = measure_workloads(preset.workloads, device, preset.repeats)
    return measure_cells(preset.name, cells, device, command_line()), folder


def unused(folder: Path) -> Path:
    """Returns the folder, or the first of `folder-2`, `folder-3`, ... without a result."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not (name / "result.json").exists())


def command_line(program: str = "stts-hf") -> str:
    """Returns the user's command line, after environment variables of memory and threads."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(TUNING)]
    return " ".join([*settings, program, shlex.join(sys.argv[1:])])
