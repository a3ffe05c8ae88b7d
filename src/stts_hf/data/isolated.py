"""A function in other processes: a crash there, as of a decoder over a damaged file, ends one call only."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Self, TypeVar

# Forking a process that has imported PyTorch takes milliseconds, starting one takes seconds. Outside Linux, system
# libraries may not be used after a fork.
FORKS = sys.platform == "linux"

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_early(module: str) -> None:
    """Starts Python's one fork server, which imports the first call's `module`, and returns at once."""
    if FORKS:
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload([module])
        with _ctrl_c_blocked():
            forkserver.ensure_running()


class ProcessDied(RuntimeError):
    """The process of a call crashed, or was stopped because the call took too long."""


class CannotStart(RuntimeError):
    """No process can be started."""


class Isolated(Generic[Item, Result]):
    """
    Calls a picklable function in other processes, one for each thread that calls at the same time:

        with Isolated(decode) as isolated, contextlib.closing(prefetch(isolated, paths, num_workers=4)) as decoded:
            ...

    Processes are kept for later calls, get the function once, use one PyTorch thread and end with this process.
    Leaving the `with` block ends calls that are under way. Not pebble's pool or that of `concurrent.futures`: their
    processes share a pipe, so one that is killed while it sends a result blocks all later calls.

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
        with self._lock:
            if self._closed:
                raise ProcessDied("Its processes were ended.")
            worker = self._idle.pop() if self._idle else None
            if new := worker is None:
                worker = _Worker()
                self._workers.append(worker)
        try:
            if new:
                worker.send_function(self._function)  # may take seconds: the process imports PyTorch
            returned, value = worker.exchange(item, self._timeout)
        except ProcessDied:
            with self._lock:
                self._workers.remove(worker)
            raise
        with self._lock:
            self._idle.append(worker)
        if returned:
            return value
        raise value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._closed = True
            workers = [*self._workers]  # each leaves the list once its call has ended
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


class _Worker:
    """A process that calls a function, one call after the other."""

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        try:
            with _ctrl_c_blocked():
                self.process.start()
        except OSError as error:
            raise _cannot_start(error) from error
        other.close()

    def send_function(self, function: Callable[[Any], Any]) -> None:
        try:
            self.exchange(function)
        except ProcessDied as error:
            raise _cannot_start(error) from error

    def exchange(self, message: Any, timeout: float | None = None) -> Any:
        """Sends a message and returns the reply. Raises `ProcessDied`."""
        with contextlib.suppress(EOFError, OSError):  # the process is gone
            self.connection.send(message)
            # The process too: another one, forked meanwhile, may hold its end of the pipe open.
            if not multiprocessing.connection.wait([self.connection, self.process.sentinel], timeout):
                self.process.kill()
                raise ProcessDied(f"it took longer than {timeout:g} seconds and was stopped.")
            if self.connection.poll():
                return self.connection.recv()
        self.connection.close()
        self.process.join()
        code = self.process.exitcode or 0
        end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise ProcessDied(f"the process ended with {end}.")


def _cannot_start(error: Exception) -> CannotStart:
    return CannotStart(
        f"No process for reading videos can be started: {error} A script that starts some must do so under "
        '`if __name__ == "__main__":`; num_workers=0 needs none.'
    )


def _serve(connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    # PyTorch would hand tensors over in shared memory, of which containers have little.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))
    with contextlib.suppress(EOFError, OSError):  # the caller is gone
        function = connection.recv()
        connection.send(None)
        while True:
            item = connection.recv()
            try:
                connection.send_bytes(ForkingPickler.dumps((True, function(item)), pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                connection.send((False, _portable(error)))


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Processes started in this block never get SIGINT, which Ctrl-C sends to every process of a terminal."""
    if os.name != "posix":
        yield
        return
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _portable(error: Exception) -> Exception:
    """The error, or a `ValueError` with its message where it cannot be unpickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    except Exception:
        return ValueError(f"{type(error).__name__}: {error}")
    return error
