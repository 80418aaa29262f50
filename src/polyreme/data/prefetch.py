"""Reads the next batches on one background thread while the caller computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def pin(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch in page-locked memory, from which an accelerator copies without waiting."""
    return {name: field.pin_memory() for name, field in batch.items()}


class Prefetcher(Generic[T]):
    """Iterates over read(first), ..., read(stop - 1), up to `depth` of them ahead.

    An error in `read` is raised at the caller when its turn comes. Use as a context manager, or
    call `close`.
    """

    def __init__(self, read: Callable[[int], T], first: int, stop: int, depth: int = 2) -> None:
        assert depth >= 1
        self._read, self._first, self._stop = read, first, stop
        self._closed = threading.Event()
        self._free = threading.Semaphore(depth)
        # Each entry is (item, error); (None, None) ends the sequence.
        self._ready: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="polyreme-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for number in range(self._first, self._stop):
                self._free.acquire()
                if self._closed.is_set():
                    return
                self._ready.put(([self._read(number)], None))
            self._ready.put(([], None))
        except BaseException as error:  # handed to the caller, whatever it is
            self._ready.put(([], error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        item, error = self._ready.get()
        if not item:
            self._over = True
            if error is not None:
                raise error
            raise StopIteration
        self._free.release()
        return item[0]

    def close(self) -> None:
        """End the thread (a read in progress is waited for) and drop what was read ahead."""
        self._over = True
        self._closed.set()
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
