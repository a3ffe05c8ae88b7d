"""Children made by `os.fork` that are killed while they work."""

import threading

import tqdm.auto
import tqdm.std


def let_go_of_shared_locks() -> None:
    """
    The first thing such a child calls. tqdm's lock is shared between processes: killed while it holds the lock, the
    child would leave its parent waiting forever for the next progress bar.
    """
    for bar in (tqdm.std.tqdm, tqdm.auto.tqdm):
        bar.set_lock(threading.RLock())
