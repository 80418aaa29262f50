"""Reading ahead on a thread."""

from __future__ import annotations

import threading

import pytest

from polyreme.data.prefetch import Prefetcher


def test_items_come_in_order_and_end() -> None:
    with Prefetcher(lambda number: number * 2, 3, 7) as items:
        assert list(items) == [6, 8, 10, 12]
        assert list(items) == []


def test_nothing_to_read() -> None:
    with Prefetcher(lambda number: number, 5, 5) as items:
        assert list(items) == []


def test_none_is_an_item_like_any_other() -> None:
    with Prefetcher(lambda _: None, 0, 2) as items:
        assert list(items) == [None, None]


def test_an_error_reaches_the_caller_in_its_turn() -> None:
    def read(number: int) -> int:
        if number == 2:
            raise OSError("disk gone")
        return number

    with Prefetcher(read, 0, 5) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(OSError, match="disk gone"):
            next(items)
        assert list(items) == []


def test_no_more_is_read_ahead_than_asked() -> None:
    seen: list[int] = []
    two_read = threading.Event()

    def read(number: int) -> int:
        seen.append(number)
        if len(seen) == 2:
            two_read.set()
        return number

    with Prefetcher(read, 0, 100, depth=2) as items:
        assert two_read.wait(10)
        assert not items._thread.join(0.05)
        assert seen == [0, 1]
        assert next(items) == 0


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_early_ends_the_thread(taken: int) -> None:
    items = Prefetcher(lambda number: number, 0, 3)
    for _ in range(taken):
        next(items)
    items.close()
    items.close()
    assert not items._thread.is_alive()
    assert list(items) == []
