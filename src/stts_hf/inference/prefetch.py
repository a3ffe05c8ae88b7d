"""Preparing the next videos while the model works on this one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
OnError = Literal["raise", "return"]


class PreparationError(RuntimeError):
    """An `item` could not be prepared: `item_id` names it, `__cause__` is the error itself."""

    def __init__(self, item: Any, item_id: object, error: Exception):
        super().__init__(f"Item {item_id} could not be prepared: {type(error).__name__}: {error}")
        self.item = item  # as `prefetch` was given it
        self.item_id = item_id
        self.__cause__ = error


def prefetch(
    prepare: Callable[[Item], Prepared],
    items: Iterable[Item],
    *,
    num_workers: int = 1,
    ahead: int = 2,
    item_id: Callable[[int, Item], object] = lambda index, item: index,
    on_error: OnError = "raise",
) -> Generator[Any, None, None]:  # of `Prepared`, or with on_error="return" of `PreparationError` too
    """Runs `prepare` on the next items in threads, while the caller uses the item before them.

    Decoding a video and turning it into tensors releases Python's lock nearly all the time, so threads suffice:

        for inputs in prefetch(lambda video: processor(text=prompt, videos=[video], return_tensors="pt"), videos):
            model.generate(**inputs)

    Args:
        prepare: what to do with an item, in a thread; must not use the model.
        items: taken one by one as there is room, by the calling thread; need not end.
        num_workers: threads that prepare, at least 1.
        ahead: how many results are ready or in the making besides the caller's, at least 1; more than `num_workers`
            evens out items of unequal length. 64 frames at 378 pixels take 110 MB each.
        item_id: what to call an item in errors, given its index and itself; the index by default.
        on_error: "raise" ends with a `PreparationError` when the item's turn comes; "return" yields the
            `PreparationError` in the item's place and continues.

    Returns:
        A generator of the results in the order of the items. `close()`, which leaving the loop calls, starts no more
        items and waits for those in the making.

    Raises:
        ValueError: `num_workers`, `ahead` or `on_error` is out of range.
        PreparationError: see `on_error`. What `items` itself raises comes after the results before it.
    """
    for name, value in (("num_workers", num_workers), ("ahead", ahead)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")

    def results() -> Generator[Prepared | PreparationError, None, None]:
        numbered = enumerate(items)
        pending: deque[tuple[int, Item, Future[Prepared]]] = deque()
        end: Exception | None = None  # why no more items come
        pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")

        def fill() -> None:
            nonlocal end
            while len(pending) < ahead and end is None:
                try:
                    index, item = next(numbered)
                except Exception as error:  # raised once the results before it are handed out
                    end = error
                else:
                    pending.append((index, item, pool.submit(prepare, item)))

        def take() -> Prepared | PreparationError:
            index, item, future = pending.popleft()
            try:
                result: Prepared | PreparationError = future.result()
            except Exception as error:
                result = PreparationError(item, item_id(index, item), error)
                if on_error == "raise":
                    raise result from error
            fill()  # before the caller is busy with this one
            return result

        try:
            fill()
            while pending:
                yield take()
            if end is not None and not isinstance(end, StopIteration):
                raise end
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return results()
