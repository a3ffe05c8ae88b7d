"""A function in processes of its own: what crashes there, as decoders do over damaged files, ends one call alone."""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, Generic, Self, TypeVar

# A process that is forked off one that has imported PyTorch starts in milliseconds, another in seconds. Elsewhere than
# on Linux, system libraries may not be used in a fork.
FORKS = sys.platform == "linux"

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_early(module: str) -> None:
    """
    Begins to import a function's module in a process of its own, which those of `Isolated` are forked off later, and
    returns at once. Python has one such process: the first call decides what it imports.
    """
    if FORKS:
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload([module])
        with _deaf_to_ctrl_c():
            forkserver.ensure_running()


class ProcessDied(RuntimeError):
    """The process of a call ended before the call did, by itself or because the call took too long."""


class CannotStart(RuntimeError):
    """No process for a call can be started."""


class Isolated(Generic[Item, Result]):
    """
    Calls a function in other processes, one for each thread that calls at the same time; they stay for later calls:

        with Isolated(decode) as isolated, contextlib.closing(prefetch(isolated, paths, num_workers=4)) as decoded:
            ...

    Processes have one thread for PyTorch each, and end with this one, however it ends; on Linux they come from Python's
    fork server, which lives on. The function, what it takes and what it returns must be picklable; it goes to a process
    once. Leaving the `with` block ends calls that are under way.

    timeout: seconds that a call may take; None sets no limit.

    Raises:
        ProcessDied: the process of this call died, or the call took longer than `timeout`; the next call has a new one.
        CannotStart: there can be no process. What the function raises comes through.
    """

    def __init__(self, function: Callable[[Item], Result], timeout: float | None = None):
        self._function, self._timeout = function, timeout
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._closed = False
        start_early(getattr(function, "func", function).__module__)

    def __call__(self, item: Item) -> Result:
        worker = self._take()
        try:
            returned, value = worker.call(item, self._timeout)
        except ProcessDied:
            with self._lock:
                self._workers.remove(worker)
            worker.end()
            raise
        with self._lock:
            self._idle.append(worker)
        if returned:
            return value
        raise value

    def _take(self) -> "_Worker":
        with self._lock:
            if self._idle and not self._closed:
                return self._idle.pop()
        worker = _Worker(self._function)  # may take seconds: it imports PyTorch
        with self._lock:
            if not self._closed:
                self._workers.append(worker)
                return worker
        worker.end()
        raise ProcessDied("Its processes were ended.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._workers)  # each leaves the list once its call has ended
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


class _Worker:
    """A process that calls a function, one call after the other."""

    def __init__(self, function: Callable[[Any], Any]):
        context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, function), daemon=True)
        try:
            with _deaf_to_ctrl_c():
                self.process.start()
            other.close()
            self._receive()
        except (ProcessDied, OSError) as error:
            raise CannotStart(
                f"No process for reading videos can be started: {error} A script that starts some must do so under "
                '`if __name__ == "__main__":`; num_workers=0 needs none.'
            ) from error

    def call(self, item: Any, timeout: float | None) -> Any:
        message = _dump(item)
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise ProcessDied(self._end()) from error
        return self._receive(timeout)

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()

    def _receive(self, timeout: float | None = None) -> Any:
        # A process that was forked meanwhile may hold the pipe open, so that its end alone says too little.
        if not multiprocessing.connection.wait([self.connection, self.process.sentinel], timeout):
            self.process.kill()
            raise ProcessDied(f"it took longer than {timeout:g} seconds and was stopped.")
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        raise ProcessDied(self._end())

    def _end(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}."


def _serve(connection: Any, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):  # whom it works for is gone
        connection.send_bytes(_dump(None))
        while True:
            item = pickle.loads(connection.recv_bytes())
            try:
                message = _dump((True, function(item)))
            except Exception as error:
                message = _dump((False, _portable(error)))
            connection.send_bytes(message)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started meanwhile never see the Ctrl-C that every process of a terminal gets: this one ends them."""
    if os.name != "posix":
        yield
        return
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pickler(pickle.Pickler):
    """Tensors as arrays: PyTorch hands them over in shared memory, of which containers have little."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _dump(value: Any) -> memoryview:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getbuffer()


def _portable(error: Exception) -> Exception:
    """The same error, or its words where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ValueError(f"{type(error).__name__}: {error}")
    return error
