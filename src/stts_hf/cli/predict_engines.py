"""Where the models of `stts-hf predict` run: one in this process, or some on Ray."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stts_hf.cli.answer_options import natural, workers_of
from stts_hf.cli.errors import CommandError, need_extras, of_option, one_line
from stts_hf.cli.options import count, positive
from stts_hf.cli.progress import stage

if TYPE_CHECKING:
    from stts_hf.inference.on_ray import RayPredictor
    from stts_hf.inference.predicting import Predictor

_Records = Generator[dict[str, Any], None, None]
Predict = Callable[[Iterable[Mapping[str, Any]]], _Records]
_OF_RAY = ("address", "models", "cpus", "gpus", "retries")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds where the models run."""
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local (default): one model in this process; ray: one model per GPU or CPU of a machine or cluster",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster; auto: the cluster running on this machine; local: a new one for this run "
        "(default: RAY_ADDRESS, else local)",
    )
    parser.add_argument("--models", type=count, metavar="N", help="number of models on Ray (default: as many as fit)")
    parser.add_argument(
        "--cpus", type=positive, metavar="N", help="CPUs per model on Ray (default: 1; with a GPU up to 4)"
    )
    parser.add_argument(
        "--gpus", type=float, metavar="N", help="GPUs per model on Ray, 0 to 1 (default: 1 if there are any)"
    )
    parser.add_argument(
        "--retries",
        type=natural,
        metavar="N",
        help="how often Ray retries a row whose process died, the last time alone (default: 2)",
    )


def check_engine(arguments: argparse.Namespace) -> None:
    """Raises `CommandError` for options that have no use, and where Ray is not installed."""
    given = [name for name in _OF_RAY if getattr(arguments, name) is not None]
    if arguments.engine == "local" and given:
        raise CommandError(f"--{given[0]} is of Ray; add --engine ray, or leave it out")
    if arguments.engine == "ray":
        need_extras("--engine ray needs more packages", "ray", module="ray")


def make_predictor(arguments: argparse.Namespace, options: Mapping[str, Any]) -> "Predictor":
    """The predictor of this process, which knows what is asked; on Ray it answers nothing itself."""
    from stts_hf.inference.predicting import Predictor

    here: dict[str, Any] = {"num_workers": workers_of(arguments)} if arguments.engine == "local" else {"device": "cpu"}
    with of_option():
        return Predictor(**{**options, **here})


@contextlib.contextmanager
def start_engine(
    arguments: argparse.Namespace, predictor: "Predictor", options: Mapping[str, Any]
) -> Iterator[tuple[str, Predict]]:
    """Where rows are answered, in words, and by what. Raises `CommandError`, where rows are answered too."""
    if arguments.engine == "local":
        with of_option(), stage(f"Loading {options['checkpoint']}"):
            model = predictor.model
        yield str(model.device), predictor.predict
        return
    from stts_hf.inference.on_ray import RayPredictor

    given = {name: getattr(arguments, name) for name in _OF_RAY if getattr(arguments, name) is not None}
    if arguments.workers is not None:
        options = {**options, "num_workers": arguments.workers}
    with contextlib.ExitStack() as stack:
        with of_option(), stage("Connecting to Ray"):
            on_ray = stack.enter_context(RayPredictor(options, **given))
        slots = on_ray.slots
        room = f", room for {slots.room} now" if slots.models > slots.room else ""
        place = f"Ray ({slots.models} models, each with {slots.gpus:g} GPUs and {slots.cpus:g} CPUs{room})"
        yield place, functools.partial(_predict, on_ray)


def _predict(predictor: "RayPredictor", rows: Iterable[Mapping[str, Any]]) -> _Records:
    from stts_hf.inference.on_ray import RayFailed

    try:
        with contextlib.closing(predictor.predict(rows)) as records:
            yield from records
    except RayFailed as error:
        raise CommandError(f"--engine ray: {one_line(error, limit=500)}") from error
