"""`prefetch`: in order, overlapping, bounded, and clear about what failed. Events decide, never the clock."""

import contextlib
import itertools
import threading

import pytest

from stts_hf.data.prefetch import prefetch

PATIENCE = 60  # seconds until a test that would hang fails


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_results_come_in_the_order_of_the_items():
    assert list(prefetch(lambda item: item * item, range(20), num_workers=3, ahead=4)) == [
        item * item for item in range(20)
    ]
    assert not running()


def test_next_item_is_prepared_while_the_caller_uses_this_one():
    in_use = [threading.Event() for _ in range(4)]
    prepared = [threading.Event() for _ in range(4)]

    def prepare(item):
        # Every item but the first is prepared only while the one before it is in the caller's hands.
        assert item == 0 or in_use[item - 1].wait(PATIENCE)
        prepared[item].set()
        return item

    for item in prefetch(prepare, range(4), ahead=1):
        in_use[item].set()
        assert item == 3 or prepared[item + 1].wait(PATIENCE)


def test_several_workers_prepare_at_once():
    both = threading.Barrier(2)
    assert list(prefetch(lambda item: both.wait(PATIENCE) >= 0, range(4), num_workers=2)) == [True] * 4


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_than_asked_is_prepared_ahead(ahead):
    taken = itertools.count()
    results = prefetch(lambda item: item, taken, ahead=ahead)  # without an end
    assert list(itertools.islice(results, 5)) == [0, 1, 2, 3, 4]
    results.close()
    assert next(taken) == 5 + ahead


def test_an_error_comes_at_its_items_turn_and_ends_it():
    results = prefetch(lambda item: 1 / item, [1, 0, 2], num_workers=2)
    assert next(results) == 1.0
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
    assert not running()


def test_error_of_the_items_themselves_comes_after_the_results_before_it():
    def items():
        yield 1
        raise OSError("the list ends here")

    results = prefetch(lambda item: item, items())
    assert next(results) == 1
    with pytest.raises(OSError, match="the list ends here"):
        next(results)
    assert not running()


def test_leaving_early_starts_no_more():
    started: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def prepare(item):
        started.append(item)
        if item == 1:
            first.set()
            assert go_on.wait(PATIENCE)
        return item

    with contextlib.closing(prefetch(prepare, range(10), ahead=5)) as results:
        assert next(results) == 0
        assert first.wait(PATIENCE)
        threading.Timer(0.1, go_on.set).start()
    assert started == [0, 1]
    assert not running()
    assert list(results) == []
