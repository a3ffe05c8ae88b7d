"""
Rows answered on Ray Data: a model on each GPU or CPU slot of this machine or a cluster, whatever of them dies.

Ray Data redoes a dead process's rows without end. So here it redoes nothing (`max_task_retries=0`) and leaves out what
is lost (`max_errored_blocks`): rows whose records never came go into the next round, in smaller blocks, and in the last
round each is alone with its process, so that no other row can have ended that.
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
from pathlib import Path
from typing import Any, Self

import torch

from stts_hf.data.isolated import CannotStart
from stts_hf.data.rows import row_id
from stts_hf.modeling.video_processing_stts import check_count
from stts_hf.video.sources import is_url

from .predicting import Predictor, record_of
from .requests import Answer

Row = Mapping[str, Any]
_BLOCKS = 8  # for each model, so that all end at about the same time
_MOST_BATCHES = 32  # of a block
_MOST_LOST = 10  # blocks of a round, and a tenth of them
_MOST_CPUS = 4  # by default, beside a GPU: as many as decode for it
_OBJECT_STORE = 2**28  # bytes, of a Ray that is started here: only rows and records go through it


class RayFailed(RuntimeError):
    """What keeps all rows from being answered on Ray: its machines do not see the checkpoint, or all processes die."""


@dataclass(frozen=True)
class Slots:
    """models: processes, each with a model. cpus, gpus: of each. room: for how many of them there is some now."""

    models: int
    cpus: float
    gpus: float
    room: int


class RayPredictor:
    """
    Answers rows as `Predictor` does, in processes of Ray's:

        with RayPredictor({"checkpoint": "my-stts"}, address="head:6379") as predictor:
            for row in predictor.predict(rows):
                print(row["answer"] or row["error"])

    Entering connects to Ray, unless this process is connected, and leaving disconnects again.

    Args:
        options: arguments of `Predictor`. The checkpoint and the videos must lie where every machine sees them, by the
            same path.
        address: `host:port` of a cluster, "auto" for the one that runs on this machine, "local" for one of its own. By
            default what `RAY_ADDRESS` says, else "local".
        models, cpus, gpus: as in `choose_slots`.
        retries: how often rows are done again whose worker died, at last each alone.

    Attributes:
        slots: what was chosen, once it is entered.

    Raises:
        ValueError: nobody listens at the address, or there are no such GPUs or CPUs.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        address: str | None = None,
        models: int | None = None,
        cpus: float | None = None,
        gpus: float | None = None,
        retries: int = 2,
    ):
        check_count("retries", retries, least=0)
        self._options = dict(options)
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._wanted = models, cpus, gpus
        self._tries = retries + 1
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import ray

        with self._stack:
            if not ray.is_initialized():
                _connect(self._address)
                self._stack.callback(ray.shutdown)
            device = self._options.get("device", "auto")
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.slots = choose_slots(machines, device, *self._wanted)
            self._options.setdefault("num_workers", max(1, min(_MOST_CPUS, int(self.slots.cpus))))
            # Ray hides other processes' GPUs, but none from one that has none.
            self._options["device"] = "cuda" if self.slots.gpus else device.replace("auto", "cpu")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def predict(self, rows: Iterable[Row]) -> Generator[dict[str, Any], None, None]:
        """
        `Predictor.predict`'s record of each row, as soon as it is there. A row that its worker died of each time is one
        with an error, and so is one over which the model raised. rows: as there, with ids that differ.

        Raises:
            ValueError: two rows have the same id.
            RayFailed: no worker can answer, or too many died.
        """
        named = [{**row, "id": row_id(row, index)} for index, row in enumerate(rows)]
        left = {row["id"]: row for row in named}
        if len(left) < len(named):
            raise ValueError("ids of rows must differ. Give each its own.")
        size = self._options.get("batch_size", 8)
        for attempt in range(1, self._tries + 1):
            if not left:
                return
            alone = 1 < attempt == self._tries
            many = min(_MOST_BATCHES * size, len(left) // (_BLOCKS * self.slots.models)) if attempt == 1 else 0
            blocks = [[row] for row in left.values()] if alone else make_blocks(left.values(), max(size, many))
            most_lost = -1 if alone else _MOST_LOST + len(blocks) // 10
            with contextlib.closing(self._answer(blocks, most_lost)) as records:
                for record in records:
                    del left[record["id"]]
                    yield record
        times = "once" if self._tries == 1 else f"{self._tries} times, at last with this row alone"
        for row in left.values():
            yield record_of(row, Answer(error=RayFailed(f"the process that was to answer it ended {times}.")))

    def _answer(self, blocks: Sequence[Sequence[Row]], most_lost: int) -> Generator[dict[str, Any], None, None]:
        """Records of rows; blocks whose process dies are left out. most_lost: of them, -1 for all."""
        import ray.data
        import ray.exceptions

        context = ray.data.DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # bytes: each record comes at once
        context.max_errored_blocks = most_lost
        with ray.data.DataContext.current(context), warnings.catch_warnings():
            warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)  # of the last two arguments
            packed = [{"rows": pickle.dumps(block)} for block in blocks]
            table = ray.data.from_items(packed, override_num_blocks=len(packed))
            records = table.map_batches(
                _Worker,
                fn_constructor_args=(self._options, os.getcwd(), platform.node()),
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(
                    size=min(self.slots.models, len(blocks)),
                    max_tasks_in_flight_per_actor=1,  # what waited in a process would die with it
                ),
                num_cpus=self.slots.cpus,
                num_gpus=self.slots.gpus,
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
            raise RayFailed(
                f"the processes on Ray end before they answer: {str(error).strip().splitlines()[-1]} What they said is "
                "in /tmp/ray/session_latest/logs of their machine."
            ) from error


class _Worker:
    """A process with a model, which it loads for its first rows: what dies then is counted like what dies later."""

    def __init__(self, options: Mapping[str, Any], folder: str, driver: str):
        self._options, self._driver = options, driver
        self._predictor: Predictor | None = None
        with contextlib.suppress(OSError):  # another machine may have no such folder
            os.chdir(folder)

    def __call__(self, batch: Any) -> Iterator[dict[str, list[str]]]:
        try:
            for record in self._answer(pickle.loads(batch["rows"][0].as_py())):
                yield {"record": [json.dumps(record)]}
        except Exception as error:  # of all rows: there is no such checkpoint, data set or package here
            failed = f"{error} (on the machine {platform.node()}, in {os.getcwd()})"
            yield {"record": [json.dumps({"failed": failed})]}

    def _answer(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Records of rows, which are asked one by one where the model raises over them together."""
        if self._predictor is None:
            self._predictor = Predictor(**self._options)
        device = self._predictor.model.device
        left = {row["id"]: row for row in rows}
        try:
            for record in self._predictor.predict(rows):
                yield self._placed(record, left.pop(record["id"]))
        except CannotStart:
            raise
        except Exception:
            _end_if_broken(device)
        for row in left.values():
            try:
                [record] = self._predictor.predict([row])
            except Exception as error:
                _end_if_broken(device)
                record = record_of(row, Answer(error=error))
            yield self._placed(record, row)

    def _placed(self, record: dict[str, Any], row: Row) -> dict[str, Any]:
        """The record; an error over a video that another machine does not see says so."""
        video, here = row.get("video"), platform.node()
        unseen = isinstance(video, str) and not is_url(video) and not Path(row.get("media_root") or "", video).exists()
        if record["error"] and unseen and here != self._driver:
            record["error"] += f" Looked for on {here}, in {os.getcwd()}: every machine must see the videos."
        return record


def _end_if_broken(device: torch.device) -> None:
    """Some errors of a GPU stay with the process: it ends, and Ray starts another."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        os._exit(1)


def make_blocks(rows: Iterable[Row], size: int) -> list[list[Row]]:
    """Rows in blocks of at most `size`, or of one video: those about one video stay together."""
    videos: dict[Any, list[Row]] = {}
    for row in rows:
        video = row.get("video")
        videos.setdefault((row.get("media_root"), video) if isinstance(video, str) else id(row), []).append(row)
    blocks: list[list[Row]] = []
    for together in videos.values():
        if not blocks or len(blocks[-1]) + len(together) > size:
            blocks.append([])
        blocks[-1].extend(together)
    return blocks


def choose_slots(
    machines: Sequence[Mapping[str, float]],
    device: str,
    models: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
) -> Slots:
    """
    How many models there are, and what each gets.

    Args:
        machines: what each of a cluster has, as {"CPU": 16.0, "GPU": 1.0}.
        device: "auto", "cpu" or "cuda".
        models: by default as many as there is room for.
        cpus: of each; by default 1, beside a GPU up to 4.
        gpus: of each, at most 1; by default 1 where there are GPUs, unless `device` is "cpu".

    Raises:
        ValueError: no machine has that much, or the arguments exclude each other.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device} must be auto, cpu or cuda on Ray, which chooses the GPU.")
    if gpus is None:
        gpus = float(device == "cuda" or (device == "auto" and any(machine.get("GPU") for machine in machines)))
    if not 0 <= gpus <= 1:
        raise ValueError(f"gpus {gpus:g} must be from 0 to 1: a model runs on one GPU.")
    if (device == "cpu" and gpus) or (device == "cuda" and not gpus):
        raise ValueError(f"device {device} and {gpus:g} gpus exclude each other. Leave one out.")

    def fit(there: float, needed: float) -> int:
        return int(there / needed + 1e-6)  # 1 / 0.1 is less than 10

    slots = [fit(machine.get("GPU", 0), gpus) for machine in machines] if gpus else []
    if cpus is None:
        beside = [machine.get("CPU", 0) // number for machine, number in zip(machines, slots, strict=False) if number]
        cpus = max(1, min(_MOST_CPUS, *beside)) if beside else 1
    fits = [fit(machine.get("CPU", 0), cpus) for machine in machines]
    room = sum(map(min, fits, slots) if gpus else fits)
    if room < 1:
        most = {name: max((machine.get(name, 0) for machine in machines), default=0) for name in ("CPU", "GPU")}
        raise ValueError(
            f"gpus {gpus:g} and cpus {cpus:g} of a model are more than a machine of this Ray has: at most "
            f"{most['GPU']:g} GPUs and {most['CPU']:g} CPUs. Ask for less, or give the address of another cluster."
        )
    return Slots(models or room, cpus, gpus, room)


def _connect(address: str) -> None:
    """Connects this process to Ray. Raises `ValueError` where there is none at the address."""
    if "://" in address:
        raise ValueError(
            f"address {address} is of a Ray client, on which Ray Data does not run. Give host:port on a machine of the "
            "cluster, or start the command there with `ray job submit`."
        )
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(
                f"address {address} cannot be reached: {error}. Give the host:port that `ray start --head` prints, or "
                "leave it out to use this machine alone."
            ) from None
    import ray
    import ray.data

    own: dict[str, Any] = (
        {"object_store_memory": _OBJECT_STORE, "include_dashboard": False} if address == "local" else {}
    )
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # what Ray raises where it cannot start has no class of its own
        raise ValueError(f"address {address} cannot be used: {error}") from error
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":  # what it says is in its files too
            handler.setLevel(logging.CRITICAL)
