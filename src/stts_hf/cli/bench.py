"""`stts-hf bench`: measures STTS beside stock Molmo2 and writes down what it found, where it loses too."""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stts_hf.cli.devices import choose_device
from stts_hf.cli.errors import CommandError
from stts_hf.cli.progress import note

if TYPE_CHECKING:  # slow to import, and `--help` needs neither
    import torch

    from stts_hf.benchmark.presets import Preset

HELP = "measure speed, FLOPs and memory beside stock Molmo2"

DEFAULT_PRESET = "tiny"
OUTPUTS = Path("outputs", "bench")  # where every other preset writes that is told nothing else
# Environment variables that change what is measured, and so are part of a result's command.
TUNING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")


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
    if arguments.list:
        refuse_without_effect(arguments, "--list")
        list_presets()
        return 0
    if arguments.render:
        render(arguments)
        return 0
    try:
        plan = make_plan(arguments)
    except ValueError as error:
        raise CommandError(str(error)) from error
    result = measure(plan)
    from stts_hf.benchmark.findings import nothing_measured
    from stts_hf.benchmark.report import markdown

    print(markdown(result), end="")
    if plan.folder is not None:
        note(f"stts-hf bench: wrote result.json, README.md and plot.png to {plan.folder}")
    problem = nothing_measured(result)
    if problem is not None:
        note(f"stts-hf bench: error: {problem}")
        return 1
    return 0


def refuse_without_effect(arguments: argparse.Namespace, option: str, *used: str) -> None:
    """Raises `CommandError` where options were given beside `option` that it does not use."""
    known = {"command", option.lstrip("-"), *used}
    given = [
        name
        for name, value in vars(arguments).items()
        if name not in known and value is not None and value is not False
    ]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(f"{option} measures nothing, so {names} would have no effect; leave out one or the other")


def list_presets() -> None:
    """Prints name, purpose and cost of every preset."""
    from stts_hf.benchmark.presets import PRESETS

    for preset in PRESETS.values():
        print(f"{preset.name:<17}{preset.help}\n{'':<17}takes {preset.takes}")


def render(arguments: argparse.Namespace) -> None:
    """Writes page and plot anew from the samples in --output."""
    from stts_hf.benchmark.output import read_result, write_result

    if arguments.output is None:
        raise CommandError("--render needs --output, the folder of the result")
    refuse_without_effect(arguments, "--render", "output")
    check_matplotlib()
    try:
        result = read_result(arguments.output)
    except ValueError as error:
        raise CommandError(str(error)) from error
    write_result(result, arguments.output)


def check_matplotlib() -> None:
    """Raises `CommandError` where the plot could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("writing a result draws a plot, which needs matplotlib: pip install 'stts-hf[bench]'")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run whose arguments were checked. folder: where it writes, or None. command: what the user typed."""

    preset: "Preset"
    device: "torch.device"
    folder: Path | None
    threads: int | None
    command: str


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Checks all that can be before measuring. Raises `ValueError` or `CommandError` for what cannot be."""
    from stts_hf.benchmark.output import check_folder
    from stts_hf.benchmark.presets import find_preset, vary
    from stts_hf.benchmark.run import check_runnable

    if arguments.threads is not None and arguments.threads < 1:
        raise CommandError(f"--threads is {arguments.threads}, but must be at least 1")
    device = choose_device(arguments.device or "auto")
    preset = vary(
        find_preset(arguments.preset or DEFAULT_PRESET, on_gpu=device.type == "cuda"),
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
    folder = arguments.output
    if folder is None and preset.name != DEFAULT_PRESET:
        folder = unused(OUTPUTS / preset.name)
    if folder is not None:
        check_matplotlib()
        check_folder(folder)
    return Plan(preset, device, folder, arguments.threads, command_line(arguments))


def unused(folder: Path) -> Path:
    """The folder, or the first of `folder-2`, `folder-3`, ... that holds no result: nobody asked for one to go."""
    from stts_hf.benchmark.output import RESULT

    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not (name / RESULT).exists())


def measure(plan: Plan) -> dict[str, Any]:
    """Measures and writes; returns the result. Whatever it raises is no mistake of the user's."""
    import torch
    from tqdm import tqdm

    from stts_hf.benchmark.output import keep_unfinished, write_result
    from stts_hf.benchmark.run import count_passes, run_preset

    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    if plan.folder is not None:
        note(f"stts-hf bench: keeps raw samples, workload by workload, in {plan.folder}")

    def on_progress(result: dict[str, Any]) -> None:
        if plan.folder is not None:
            keep_unfinished(result, plan.folder)

    with ending_on_sigterm(), tqdm(total=count_passes(plan.preset), unit="pass", file=sys.stderr) as bar:

        def on_pass(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        result = run_preset(plan.preset, plan.device, plan.command, on_pass, on_progress)
        bar.total = bar.n  # rounds that the time did not allow
        bar.refresh()
    if plan.folder is not None:
        write_result(result, plan.folder)
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
    words = ["stts-hf", "bench", "--preset", arguments.preset or DEFAULT_PRESET]
    for name, value in vars(arguments).items():
        if name in ("preset", "command", "list", "render", "force") or value in (None, "auto"):
            continue
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    if arguments.force:
        words.append("--force")
    return " ".join([*settings, shlex.join(words)])
