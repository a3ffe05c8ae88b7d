"""Preparing the next videos while the model works on this one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Literal, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
OnError = Literal["raise", "return"]


class PreparationError(RuntimeError):
    """What an item could not be prepared for: `item_id` names it, `__cause__` is the error itself."""

    def __init__(self, item_id: object, error: Exception):
        super().__init__(f"Item {item_id} could not be prepared: {type(error).__name__}: {error}")
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
) -> "Prefetch[Item, Prepared]":
    """Runs `prepare` on the items to come in threads of its own, while the caller uses the item before.

    Decoding a video and turning it into tensors releases Python's lock nearly all the time, so threads suffice:

        with prefetch(lambda video: processor(text=prompt, videos=[video], return_tensors="pt"), videos) as batches:
            for inputs in batches:
                model.generate(**inputs)

    Args:
        prepare: what to do with an item, in a thread; must not use the model.
        items: taken one by one as there is room, by the calling thread; need not end.
        num_workers: threads that prepare, at least 1.
        ahead: results that are ready or in the making besides the one in the caller's hands, at least 1; more than
            `num_workers` evens out items of unequal length. 64 frames at 378 pixels take 110 MB each.
        item_id: what to call an item in errors, given its index and itself; the index by default.
        on_error: "raise" ends with a `PreparationError` when the item's turn comes; "return" hands the
            `PreparationError` out in the item's place and goes on.

    Returns:
        An iterator over the results in the order of the items. Leaving it by `with` or `close()` starts no more items
        and waits for those in the making; so does reaching the end.

    Raises:
        ValueError: `num_workers`, `ahead` or `on_error` is out of range.
        PreparationError: see `on_error`. What `items` itself raises comes after the results before it.
    """
    for name, value in (("num_workers", num_workers), ("ahead", ahead)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")
    return Prefetch(prepare, items, num_workers, ahead, item_id, on_error)


class Prefetch(Generic[Item, Prepared]):
    """What `prefetch` returns: an iterator, and a context manager that closes it."""

    def __init__(
        self,
        prepare: Callable[[Item], Prepared],
        items: Iterable[Item],
        num_workers: int,
        ahead: int,
        item_id: Callable[[int, Item], object],
        on_error: OnError,
    ):
        self._prepare, self._items, self._ahead = prepare, enumerate(items), ahead
        self._item_id, self._on_error = item_id, on_error
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")
        self._pending: deque[tuple[object, Future[Prepared]]] = deque()
        self._items_error: Exception | None = None
        self._is_closed = False

    def __enter__(self) -> "Prefetch[Item, Prepared]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # a `Prepared`, or with on_error="return" a `PreparationError`
        if self._is_closed:
            raise StopIteration
        try:
            self._fill(self._ahead)
            if not self._pending:
                self.close()
                raise self._items_error or StopIteration
            name, future = self._pending.popleft()
            try:
                result: Prepared | PreparationError = future.result()
            except Exception as error:
                failure = PreparationError(name, error)
                if self._on_error == "raise":
                    raise failure from error
                result = failure
            self._fill(self._ahead)  # before the caller is busy with this one
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise
        return result

    def close(self) -> None:
        """Starts no more items and waits for those in the making; what was prepared is let go. May be repeated."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _fill(self, count: int) -> None:
        while len(self._pending) < count and self._items_error is None:
            try:
                entry = next(self._items, None)
            except Exception as error:  # raised once what came before it is handed out
                self._items_error = error
                return
            if entry is None:
                return
            index, item = entry
            self._pending.append((self._item_id(index, item), self._pool.submit(self._prepare, item)))
