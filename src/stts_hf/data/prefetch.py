"""Preparing the next items while the caller works on this one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


def prefetch(
    prepare: Callable[[Item], Prepared], items: Iterable[Item], *, num_workers: int = 1, ahead: int = 2
) -> Generator[Prepared, None, None]:
    """Runs `prepare` on the next items in threads, while the caller uses the item before them.

    Decoding a video and turning it into tensors releases Python's lock nearly all the time, so threads suffice:

        for inputs in prefetch(lambda video: processor(text=prompt, videos=[video], return_tensors="pt"), videos):
            model.generate(**inputs)

    Args:
        prepare: what to do with an item, in a thread; must not use the model.
        items: taken one by one by the calling thread; may be endless.
        num_workers: number of threads.
        ahead: number of items prepared ahead of the caller's. 64 frames at 378 pixels take 110 MB each.

    Yields:
        The results in the order of the items. An error of `prepare`, or of `items`, comes after the results before it
        and ends the iteration. `close()`, which leaving the loop calls, waits for items that are being prepared.
    """
    remaining = iter(items)
    pending: deque[Future[Prepared]] = deque()
    end: Exception | None = None  # why no more items come
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")
    try:
        while pending or end is None:
            try:
                while end is None and len(pending) <= ahead:
                    pending.append(pool.submit(prepare, next(remaining)))
            except Exception as error:
                end = error
            if pending:
                yield pending.popleft().result()
        if end is not None and not isinstance(end, StopIteration):
            raise end
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
