"""
Rows answered on Ray Data, with a model on each GPU or CPU slot of this machine or of a cluster.

By itself Ray Data retries the rows of a process that dies without end. Here it retries nothing (`max_task_retries=0`)
and leaves out what is lost (`max_errored_blocks`): rows without a record go into the next round, and in the last round
each row has a block of its own, so that it can end no other.
"""

import contextlib
import json
import logging
import os
import pickle
import platform
import socket
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stts_hf.data.isolated import CannotStart

from .predictor import Predictor, Row, record_of, video_name
from .requests import Answer

_BLOCKS = 8  # for each model, so that all models end at about the same time
_MOST_BATCHES = 32  # of a block
_MOST_LOST = 10  # blocks of a round, and a tenth of them
_MOST_CPUS = 4  # beside a GPU, by default
_OBJECT_STORE = 2**28  # bytes, of a Ray that is started here: only rows and records go through it


class RayFailed(RuntimeError):
    """No process can answer: a machine does not see the checkpoint, or too many processes die."""


@dataclass(frozen=True)
class Slots:
    """models: processes, each with a model. cpus, gpus: what each of them gets."""

    models: int
    cpus: float
    gpus: float


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[list[dict[str, float]]]:
    """
    Connects this process to Ray, unless it is connected, until the `with` block ends. Gives what each machine has, as
    `{"CPU": 16.0, "GPU": 1.0}`.

    address: `host:port` of a cluster, "auto" for the one that runs on this machine, "local" to start one. By default
    `RAY_ADDRESS`, else "local". Raises `ValueError` if there is none at the address.
    """
    import ray
    import ray.data

    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            _connect(address or os.environ.get("RAY_ADDRESS") or "local")
            stack.callback(ray.shutdown)
        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _connect(address: str) -> None:
    import ray

    new: dict[str, Any] = {"object_store_memory": _OBJECT_STORE, "include_dashboard": False}
    try:
        if address not in ("auto", "local"):  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **(new if address == "local" else {}))
    except Exception as error:  # Ray's have no common class
        raise ValueError(
            f"address {address} cannot be used: {error}. Give the host:port that `ray start --head` prints, or leave "
            "it out to use this machine; Ray Data does not run over ray://."
        ) from error
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":  # its files have the same lines
            handler.setLevel(logging.CRITICAL)


def choose_slots(
    machines: Sequence[Mapping[str, float]],
    device: str = "auto",
    models: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
) -> Slots:
    """How many models there are and what each gets; by default all that fit. Raises `ValueError`."""
    with_gpus = [machine for machine in machines if machine.get("GPU")]
    if gpus is None:
        gpus = float(device == "cuda" or (device == "auto" and bool(with_gpus)))
    if not 0 <= gpus <= 1 or device not in ("auto", "cuda" if gpus else "cpu"):
        raise ValueError(f"gpus {gpus:g} does not fit device {device}. Pass 0 to 1 for cuda, and 0 for cpu.")
    if cpus is None:
        both = [sum(machine.get(name, 0) for machine in with_gpus) for name in ("CPU", "GPU")]
        cpus = max(1, min(_MOST_CPUS, both[0] * gpus // both[1])) if gpus and with_gpus else 1
    needs = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    # 1 / 0.1 may be less than 10.
    room = sum(min(int(one.get(name, 0) / need + 1e-6) for name, need in needs.items()) for one in machines)
    if not room:
        raise ValueError(
            f"gpus {gpus:g} and cpus {cpus:g} per model are more than any machine has: {machines}. Lower them."
        )
    return Slots(models or room, cpus, gpus)


def predict_on_ray(
    rows: Iterable[Row], options: Mapping[str, Any], slots: Slots, retries: int = 2
) -> Generator[dict[str, Any], None, None]:
    """
    `Predictor.predict`'s record of each row, as soon as it is there; this process is connected to Ray. A row that ends
    its process each time has an error, and so has one over which the model raises.

    rows: as there, with ids that differ. options: arguments of `Predictor`; every machine sees checkpoint and videos by
    the same paths. retries: how often rows are asked again whose process died, in the last round each alone. Raises
    `RayFailed`.
    """
    workers = max(1, min(_MOST_CPUS, int(slots.cpus)))
    # Ray hides GPUs of other processes, but none from a process without any.
    options = {"num_workers": workers, **options, "device": "cuda" if slots.gpus else "cpu"}
    left = {row["id"]: row for row in sorted(rows, key=lambda row: video_name(row) or "")}
    size = options.get("batch_size", 8)
    for attempt in range(retries + 1):
        if not left:
            return
        alone = 0 < attempt == retries
        many = 0 if attempt else min(_MOST_BATCHES * size, len(left) // (_BLOCKS * slots.models))
        step = 1 if alone else max(size, many)
        waiting = [*left.values()]
        blocks = [waiting[start : start + step] for start in range(0, len(waiting), step)]
        with contextlib.closing(_answer(blocks, options, slots, len(blocks) if alone else None)) as records:
            for record in records:
                del left[record["id"]]
                yield record
    for row in left.values():
        died = RayFailed(f"the process that was to answer it ended, in each of {retries + 1} rounds.")
        yield record_of(row, Answer(error=died))


def _answer(
    blocks: Sequence[Sequence[Row]], options: Mapping[str, Any], slots: Slots, most_lost: int | None
) -> Generator[dict[str, Any], None, None]:
    """Records of rows, without those of up to `most_lost` blocks whose process dies."""
    import ray.data
    import ray.exceptions

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # bytes: each record comes at once
    context.max_errored_blocks = _MOST_LOST + len(blocks) // 10 if most_lost is None else most_lost
    with ray.data.DataContext.current(context), warnings.catch_warnings():
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)  # of the last two arguments
        packed = [{"rows": pickle.dumps(block)} for block in blocks]
        records = ray.data.from_items(packed, override_num_blocks=len(blocks)).map_batches(
            _Worker,
            fn_constructor_args=(options, os.getcwd(), platform.node()),
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=min(slots.models, len(blocks)),
                max_tasks_in_flight_per_actor=1,  # waiting blocks would die with the process
            ),
            num_cpus=slots.cpus,
            num_gpus=slots.gpus,
            max_restarts=-1,
            max_task_retries=0,
        )
    try:
        batches: Iterable[Any] = records.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        for batch in batches:
            for record in map(json.loads, batch["record"].to_pylist()):
                if "failed" in record:
                    raise RayFailed(record["failed"])
                yield record
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()[-1]
        raise RayFailed(f"too many processes end: {said} Ray's logs are in /tmp/ray/session_latest/logs.") from error


class _Worker:
    """A process with a model, which it loads for its first rows: a death then counts like a later one."""

    def __init__(self, options: Mapping[str, Any], folder: str, driver: str):
        self._options = options
        self._predictor: Predictor | None = None
        self._place = "" if platform.node() == driver else f" (on the machine {platform.node()}, in {folder})"
        with contextlib.suppress(OSError):  # another machine may have no such folder
            os.chdir(folder)

    def __call__(self, batch: Any) -> Iterator[dict[str, list[str]]]:
        try:
            if self._predictor is None:
                predictor = Predictor(**self._options)
                predictor.model  # noqa: B018 - loads it
                self._predictor = predictor
            rows = pickle.loads(batch["rows"][0].as_py())  # noqa: S301 - of this run
            for record in self._answer(self._predictor, rows):
                record["error"] = record["error"] and record["error"] + self._place
                yield {"record": [json.dumps(record)]}
        except Exception as error:  # of every row: no such checkpoint, data set or package here
            yield {"record": [json.dumps({"failed": f"{error}{self._place}"})]}

    def _answer(self, predictor: Predictor, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Records of rows, which are asked one by one where the model raises."""
        left = {row["id"]: row for row in rows}
        try:
            for record in predictor.predict(rows):
                del left[record["id"]]
                yield record
        except CannotStart:
            raise
        except Exception as error:
            try:
                torch.zeros(1, device=predictor.model.device).item()
            except RuntimeError:
                os._exit(1)  # its GPU is lost to this process; Ray starts another
            for row in left.values():
                if len(rows) == 1:
                    yield record_of(row, Answer(error=error))
                else:
                    yield from self._answer(predictor, [row])
