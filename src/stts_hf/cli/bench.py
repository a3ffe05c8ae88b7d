"""`stts-hf bench`: measures STTS beside the stock model and writes down what it found."""

import argparse
import itertools
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from stts_hf.benchmark.presets import PRESETS, find_preset, vary
from stts_hf.cli.errors import CommandError
from stts_hf.cli.options import check_writable, choose_device, count, share
from stts_hf.cli.progress import note
from stts_hf.selectors import SELECTORS

HELP = "measure speed, FLOPs and memory beside the stock model"

DEFAULT_PRESET = "tiny"
OUTPUTS = Path("outputs", "bench")  # where every other preset writes that is told nothing else
# Environment variables that change what is measured, and so are part of a result's command.
TUNING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")


# Option: the field of a workload that it is for, and what it takes.
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "modes": ("mode", {"choices": ("tower", "inference", "training")}),
    "frames": ("frames", {"type": count, "metavar": "T", "help": "frames of each video"}),
    "ratios": ("ratios", {"type": share, "metavar": "K", "help": "pruning ratios, 0 to 1"}),
    "batches": ("batch", {"type": count, "metavar": "B", "help": "rows, each with one video"}),
    "selectors": ("selector", {"choices": (*SELECTORS, "evs"), "help": "evs drops after the ViT"}),
    "pruning_layers": ("pruning_layer", {"type": int, "metavar": "L", "help": "layers after which blocks go, from 0"}),
    "layouts": ("layout", {"choices": ("varlen", "first_fit_descending")}),
    "backends": ("backend", {"choices": ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")}),
    "dtypes": ("dtype", {"choices": ("float32", "bfloat16", "float16")}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--preset", choices=PRESETS, metavar="NAME", help=f"workload; --list shows all (default: {DEFAULT_PRESET})"
    )
    parser.add_argument("--list", action="store_true", help="print the presets with their values, and exit")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write result.json and README.md there (default: outputs/bench/PRESET; tiny only prints)",
    )
    parser.add_argument(
        "--render", action="store_true", help="write the page of an earlier result in --output again; measures nothing"
    )
    axes = parser.add_argument_group("values that replace the preset's; every combination is measured")
    for name, (_, argument) in AXES.items():
        axes.add_argument(f"--{name.replace('_', '-')}", nargs="+", **argument)
    parser.add_argument("--repeats", type=count, metavar="N", help="timed rounds of each workload (default: 3 or 4)")
    parser.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, ...")


def execute(arguments: argparse.Namespace) -> int:
    """
    Runs the command. Returns its exit status, 1 where nothing could be measured; raises `CommandError` for what the
    user got wrong, before anything is measured.
    """
    for option, used in (("list", {"list"}), ("render", {"render", "output"})):
        if getattr(arguments, option):
            given = {name for name, value in vars(arguments).items() if value not in (None, False)} - {"command", *used}
            if given:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
                raise CommandError(f"--{option} measures nothing, so {names} would have no effect")
            list_presets() if option == "list" else render(arguments.output)
            return 0
    return measure(arguments)


def list_presets() -> None:
    """Prints name, purpose and cost of every preset."""
    for preset in PRESETS.values():
        print(f"{preset.name:<17}{preset.help}\n{'':<17}takes {preset.takes}")


def render(folder: Path | None) -> None:
    """Writes the page anew from the samples in `folder`."""
    from stts_hf.benchmark.report import read_result, write_page

    if folder is None:
        raise CommandError("--render needs --output, the folder of the result")
    check_writable("--output", folder)
    try:
        write_page(read_result(folder), folder)
    except ValueError as error:
        raise CommandError(str(error)) from error


def measure(arguments: argparse.Namespace) -> int:
    """Checks all that can be before measuring, then measures, writes and prints. Returns the exit status."""
    from stts_hf.benchmark.measure import check_runnable, run_preset
    from stts_hf.benchmark.report import check_folder, markdown, nothing_measured, write_result

    device = choose_device(arguments.device or "auto")
    axes = {field: getattr(arguments, name) for name, (field, _) in AXES.items()}
    if axes["ratios"]:
        axes["ratios"] = [tuple(sorted(set(axes["ratios"])))]  # all of them in one workload
    try:
        preset = find_preset(arguments.preset or DEFAULT_PRESET, on_gpu=device.type == "cuda")
        preset = vary(preset, axes.pop("mode"), arguments.repeats, **axes)
        check_runnable(preset, device)
        folder = arguments.output or (None if preset.name == DEFAULT_PRESET else unused(OUTPUTS / preset.name))
        if folder is not None:
            check_writable("--output", folder)
            check_folder(folder)
            note(f"stts-hf bench: writes to {folder}")
    except ValueError as error:
        raise CommandError(str(error)) from error
    # SIGTERM ends the command as Ctrl-C does, so that its temporary files go with it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for result in run_preset(preset, device, command_line()):
            if folder is not None:
                write_result(result, folder)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(markdown(result), end="")
    if problem := nothing_measured(result):
        note(f"stts-hf bench: error: {problem}")
        return 1
    return 0


def unused(folder: Path) -> Path:
    """The folder, or the first of `folder-2`, `folder-3`, ... that holds no result: nobody asked for one to go."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not (name / "result.json").exists())


def command_line(program: str = "stts-hf") -> str:
    """What the user typed, after what the environment sets of memory and threads."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(TUNING)]
    return " ".join([*settings, program, shlex.join(sys.argv[1:])])
