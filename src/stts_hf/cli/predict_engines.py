"""Engines of `stts-hf predict`: one model in this process, or several on Ray."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stts_hf.cli.checkpoint_options import load_weights, predictor_options
from stts_hf.cli.errors import CommandError, need_extras, refused
from stts_hf.cli.options import count, natural, positive
from stts_hf.cli.progress import stage

if TYPE_CHECKING:
    from stts_hf.inference.predictor import Predictor

Predict = Callable[[Iterable[Mapping[str, Any]]], Generator[dict[str, Any], None, None]]
_RAY_OPTIONS: dict[str, dict[str, Any]] = {
    "address": {
        "metavar": "HOST:PORT",
        "help": "address of the Ray cluster; auto: the cluster running on this machine; local: a new one for this run "
        "(default: RAY_ADDRESS, else local)",
    },
    "models": {"type": count, "metavar": "N", "help": "number of models on Ray (default: as many as fit)"},
    "cpus": {"type": positive, "metavar": "N", "help": "CPUs per model on Ray (default: 1; with a GPU up to 4)"},
    "gpus": {"type": float, "metavar": "N", "help": "GPUs per model on Ray, 0 to 1 (default: 1 if there are any)"},
    "retries": {"type": natural, "metavar": "N", "help": "retries of rows whose process on Ray died (default: 2)"},
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--engine` and the options of Ray."""
    engines = "local (default): one model in this process; ray: one model per GPU or CPU of a machine or cluster"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=engines)
    for name, settings in _RAY_OPTIONS.items():
        parser.add_argument(f"--{name}", **settings)


def check_engine(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for options of Ray with another engine, and if Ray is not installed."""
    given = [name for name in _RAY_OPTIONS if getattr(arguments, name) is not None]
    if arguments.engine == "local" and given:
        raise CommandError(f"--{given[0]} needs --engine ray")
    if arguments.engine == "ray":
        need_extras("--engine ray needs more packages", "ray", module="ray")


@contextlib.contextmanager
def start_engine(arguments: argparse.Namespace, predictor: "Predictor") -> Iterator[tuple[str, Predict]]:
    """Gives a name for where the models run, and a function that answers rows. Raises `CommandError`."""
    if arguments.engine == "local":
        yield str(load_weights(arguments, predictor).device), predictor.predict
        return
    from stts_hf.inference.on_ray import RayFailed, choose_slots, connect, predict_on_ray

    options = predictor_options(arguments)
    if arguments.workers is not None:
        options["num_workers"] = arguments.workers
    with contextlib.ExitStack() as stack:
        with refused("--"), stage("Connecting to Ray"):
            machines = stack.enter_context(connect(arguments.address))
            slots = choose_slots(machines, arguments.device, arguments.models, arguments.cpus, arguments.gpus)
        place = f"Ray ({slots.models} models, each with {slots.gpus:g} GPUs and {slots.cpus:g} CPUs)"
        retries = {} if arguments.retries is None else {"retries": arguments.retries}
        with refused("--engine ray: ", RayFailed):
            yield place, functools.partial(predict_on_ray, options=options, slots=slots, **retries)
