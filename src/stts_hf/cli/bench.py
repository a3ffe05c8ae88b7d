"""`stts-hf bench`: measures STTS beside stock Molmo2 and writes down what it found, where it loses too."""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stts_hf.cli.devices import choose_device
from stts_hf.cli.errors import CommandError

HELP = "measure speed, FLOPs and memory beside stock Molmo2"

# Environment variables that change what is measured, and so are part of a result's command.
TUNING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--preset", default="tiny", metavar="NAME", help="what to measure; see --list (default: tiny)")
    parser.add_argument("--list", action="store_true", help="say what presets there are and what they take, and stop")
    parser.add_argument(
        "--output", type=_folder, metavar="FOLDER", help="write result.json, README.md and plot.png there"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing; redo page and plot of --output's result"
    )
    axes = parser.add_argument_group("other values than the preset's; every combination of them is measured")
    axes.add_argument("--modes", nargs="+", metavar="MODE", help="tower, inference, training")
    axes.add_argument("--frames", nargs="+", type=int, metavar="T", help="frames of each video")
    axes.add_argument("--ratios", nargs="+", type=float, metavar="K", help="pruning ratios, 0 to 1")
    axes.add_argument("--batches", nargs="+", type=int, metavar="B", help="rows, each with one video")
    axes.add_argument("--layouts", nargs="+", metavar="NAME", help="varlen, first_fit_descending")
    backends = "sdpa, eager, flex_attention, flash_attention_2, flash_attention_3"
    axes.add_argument("--backends", nargs="+", metavar="NAME", help=backends)
    axes.add_argument("--dtypes", nargs="+", metavar="NAME", help="float32, bfloat16, float16")
    parser.add_argument("--repeats", type=int, metavar="N", help="most timed rounds of each workload")
    parser.add_argument("--budget-minutes", type=float, metavar="M", help="stop at 3 rounds each once these are spent")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's own choice)")
    parser.add_argument("--force", action="store_true", help="run a preset for a GPU on a CPU all the same")


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("must name a folder, but is empty")
    return Path(text)


def execute(arguments: argparse.Namespace) -> None:
    """Runs the command; raises `CommandError` for what the user got wrong."""
    if arguments.list:
        list_presets()
        return
    if arguments.output is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--output draws a plot, which needs matplotlib: pip install 'stts-hf[bench]'")
    if arguments.threads is not None and arguments.threads < 1:
        raise CommandError(f"--threads is {arguments.threads}, but must be at least 1")
    try:
        if arguments.render:
            render(arguments.output)
            return
        result = measure(arguments)
    except ValueError as error:
        raise CommandError(str(error)) from error
    from stts_hf.benchmark.report import markdown

    print(markdown(result), end="")


def list_presets() -> None:
    """Prints name, purpose and cost of every preset."""
    from stts_hf.benchmark.presets import PRESETS

    for preset in PRESETS.values():
        print(f"{preset.name:<17}{preset.help}\n{'':<17}takes {preset.takes}")


def render(folder: Path | None) -> None:
    """Writes page and plot anew from the samples in `folder`."""
    from stts_hf.benchmark.output import read_result, write_result

    if folder is None:
        raise CommandError("--render needs --output, the folder of the result")
    write_result(read_result(folder), folder)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Checks everything, measures, writes; returns the result. Raises `ValueError` for what cannot be."""
    import torch
    from tqdm import tqdm

    from stts_hf.benchmark.output import check_folder, keep_unfinished, write_result
    from stts_hf.benchmark.presets import find_preset, vary
    from stts_hf.benchmark.run import check_runnable, count_passes, run_preset

    device = choose_device(arguments.device)
    preset = vary(
        find_preset(arguments.preset, on_gpu=device.type == "cuda"),
        modes=arguments.modes,
        frames=arguments.frames,
        ratios=arguments.ratios,
        batches=arguments.batches,
        layouts=arguments.layouts,
        backends=arguments.backends,
        dtypes=arguments.dtypes,
        repeats=arguments.repeats,
        budget_minutes=arguments.budget_minutes,
    )
    check_runnable(preset, device, arguments.force)
    if arguments.output is not None:
        check_folder(arguments.output)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)

    def on_progress(result: dict[str, Any]) -> None:
        if arguments.output is not None:
            keep_unfinished(result, arguments.output)

    with ending_on_sigterm(), tqdm(total=count_passes(preset), unit="pass", file=sys.stderr) as bar:

        def on_pass(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        result = run_preset(preset, device, command_line(arguments), on_pass, on_progress)
        bar.total = bar.n  # rounds that the time did not allow
        bar.refresh()
    if arguments.output is not None:
        write_result(result, arguments.output)
    return result


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that its temporary files go with it."""
    if threading.current_thread() is not threading.main_thread():  # only there can a signal be handled
        yield
        return

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command_line(arguments: argparse.Namespace) -> str:
    """What the user typed, as far as it matters, after what the environment sets of memory and threads."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(TUNING)]
    words = ["stts-hf", "bench", "--preset", arguments.preset]
    for name, value in vars(arguments).items():
        if (
            name in ("preset", "command", "list", "render", "force")
            or value is None
            or (name, value) == ("device", "auto")
        ):
            continue
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    if arguments.force:
        words.append("--force")
    return " ".join([*settings, shlex.join(words)])
