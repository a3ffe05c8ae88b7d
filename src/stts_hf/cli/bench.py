"""`stts-hf bench`: measures STTS beside stock Molmo2 and writes down what it found."""

import argparse
import itertools
import os
import shlex
import signal
from pathlib import Path
from typing import Any

from stts_hf.cli.devices import choose_device
from stts_hf.cli.errors import CommandError
from stts_hf.cli.progress import note, progress_bar

HELP = "measure speed, FLOPs and memory beside stock Molmo2"

DEFAULT_PRESET = "tiny"
OUTPUTS = Path("outputs", "bench")  # where every other preset writes that is told nothing else
# Environment variables that change what is measured, and so are part of a result's command.
TUNING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
AXES: dict[str, tuple[type, str, str]] = {
    "modes": (str, "MODE", "tower, inference, training"),
    "frames": (int, "T", "frames of each video"),
    "ratios": (float, "K", "pruning ratios, 0 to 1"),
    "batches": (int, "B", "rows, each with one video"),
    "layouts": (str, "NAME", "varlen, first_fit_descending"),
    "backends": (str, "NAME", "sdpa, eager, flex_attention, flash_attention_2, flash_attention_3"),
    "dtypes": (str, "NAME", "float32, bfloat16, float16"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--preset", metavar="NAME", help=f"what to measure; see --list (default: {DEFAULT_PRESET})")
    parser.add_argument("--list", action="store_true", help="say what presets there are and what they take, and stop")
    parser.add_argument(
        "--output",
        type=_folder,
        metavar="FOLDER",
        help="write result.json, README.md and plot.png there (default: outputs/bench/PRESET; tiny only prints)",
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing; redo page and plot of --output's result"
    )
    axes = parser.add_argument_group("other values than the preset's; every combination of them is measured")
    for name, (kind, metavar, help_text) in AXES.items():
        axes.add_argument(f"--{name}", nargs="+", type=kind, metavar=metavar, help=help_text)
    parser.add_argument("--repeats", type=int, metavar="N", help="most timed rounds of each workload")
    parser.add_argument("--budget-minutes", type=float, metavar="M", help="stop at 3 rounds each once these are spent")
    parser.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's own choice)")
    parser.add_argument("--force", action="store_true", help="run a preset for a GPU on a CPU all the same")


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("must name a folder, but is empty")
    return Path(text)


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
    from stts_hf.benchmark.presets import PRESETS

    for preset in PRESETS.values():
        print(f"{preset.name:<17}{preset.help}\n{'':<17}takes {preset.takes}")


def render(folder: Path | None) -> None:
    """Writes page and plot anew from the samples in `folder`."""
    from stts_hf.benchmark.output import check_folder, read_result, write_result

    if folder is None:
        raise CommandError("--render needs --output, the folder of the result")
    try:
        check_folder(folder)
        write_result(read_result(folder), folder)
    except ValueError as error:
        raise CommandError(str(error)) from error


def measure(arguments: argparse.Namespace) -> int:
    """Checks all that can be before measuring, then measures, writes and prints. Returns the exit status."""
    import torch

    from stts_hf.benchmark.output import check_folder, keep_unfinished, write_result
    from stts_hf.benchmark.presets import find_preset, vary
    from stts_hf.benchmark.report import markdown, nothing_measured
    from stts_hf.benchmark.run import check_runnable, count_passes, run_preset

    if arguments.threads is not None and arguments.threads < 1:
        raise CommandError(f"--threads is {arguments.threads}, but must be at least 1")
    device = choose_device(arguments.device or "auto")
    try:
        preset = vary(
            find_preset(arguments.preset or DEFAULT_PRESET, on_gpu=device.type == "cuda"),
            repeats=arguments.repeats,
            budget_minutes=arguments.budget_minutes,
            **{name: getattr(arguments, name) for name in AXES},
        )
        check_runnable(preset, device, arguments.force)
        folder = arguments.output or (None if preset.name == DEFAULT_PRESET else unused(OUTPUTS / preset.name))
        if folder is not None:
            check_folder(folder)
            note(f"stts-hf bench: writes to {folder}")
    except ValueError as error:
        raise CommandError(str(error)) from error
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    # SIGTERM ends the command as Ctrl-C does, so that its temporary files go with it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bar(count_passes(preset), "pass") as bar:

            def on_pass(what: str) -> None:
                bar.set_description(what, refresh=False)
                bar.update()

            def on_progress(result: dict[str, Any]) -> None:
                if folder is not None:
                    keep_unfinished(result, folder)

            result = run_preset(preset, device, command_line(arguments), on_pass, on_progress)
    finally:
        signal.signal(signal.SIGTERM, before)
    if folder is not None:
        write_result(result, folder)
    print(markdown(result), end="")
    problem = nothing_measured(result)
    if problem is not None:
        note(f"stts-hf bench: error: {problem}")
        return 1
    return 0


def unused(folder: Path) -> Path:
    """The folder, or the first of `folder-2`, `folder-3`, ... that holds no result: nobody asked for one to go."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not (name / "result.json").exists())


def command_line(arguments: argparse.Namespace) -> str:
    """What the user typed, as far as it matters, after what the environment sets of memory and threads."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(TUNING)]
    words = ["stts-hf", "bench", "--preset", arguments.preset or DEFAULT_PRESET]
    for name, value in vars(arguments).items():
        if name in ("preset", "command") or value in (None, False, "auto"):
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join([*settings, shlex.join(words)])
