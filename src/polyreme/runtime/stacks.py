"""Python stacks of other processes of this host, also of those that hang or were stopped."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_ANSWER_S = 1.0
_POLL_S = 0.02
_MOST_LINES = 40
_MOST_BYTES = 2**20
_LAUNCHERS = ("zygote.py", "training.py")  # frames below them are the same for every rank


def answer(box: Path, rank: int) -> IO[str]:
    """Have this process write its stacks to ``RANK.stack`` whenever it gets SIGUSR1.

    The system's handler writes them, so it works while Python is held up. Keep what is returned.
    """
    file = (box / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return file


def ask(pids: Mapping[int, int], box: Path) -> dict[int, str]:
    """The main thread's stack by rank, of those that answer; a stopped process is woken for it."""
    paths = {rank: box / f"{rank}.stack" for rank in pids}
    paths = {rank: path for rank, path in paths.items() if path.exists()}  # else it would die
    for rank in paths:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pids[rank], signal.SIGUSR1)
            os.kill(pids[rank], signal.SIGCONT)
    end_s = time.monotonic() + _ANSWER_S
    sizes: dict[int, int] = {}
    while time.monotonic() < end_s:
        time.sleep(_POLL_S)
        before, sizes = sizes, {rank: path.stat().st_size for rank, path in paths.items()}
        if before == sizes and all(sizes.values()):
            break
    said = {rank: path.read_bytes()[:_MOST_BYTES] for rank, path in paths.items()}
    return {rank: _main(text.decode(errors="replace")) for rank, text in said.items() if text}


def _main(text: str) -> str:
    """The last of the threads that faulthandler lists is the one that began first."""
    lines = text.strip().split("\n\n")[-1].splitlines()
    frames = [line for line in lines if line.startswith("  ")]
    below = next(
        (at for at, line in enumerate(frames) if any(n in line for n in _LAUNCHERS)), len(frames)
    )
    return "\n".join(frames[:below][:_MOST_LINES])
