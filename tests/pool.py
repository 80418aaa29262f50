"""A pool of warm processes, so that a test over n processes costs a tenth of a second.

`Pool(n).run(function, *args)` calls `function(world, *args)` in n processes that form a new
process group. What it returns or raises comes back; a process that hangs or dies is reported,
with the stack of each that hangs, and not waited for.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "polyreme.runtime.loop",
]
_GRACE_S = 5.0
_MOST_THREADS = 24


class ProcessFailed(AssertionError):
    """One or more processes raised, died or hung; the text holds what each said."""


class Failure:
    """What a process said in place of a result."""

    def __init__(self, text: str, error: BaseException | None = None) -> None:
        self.text = text
        self.error = error

    def __repr__(self) -> str:
        return self.text


class Pool:
    """Warm processes; called with a number it gives that many of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._store: Any = None
        self._n_runs = 0

    def __call__(self, n: int) -> Group:
        return Group(self, n)

    def outcomes(self, n: int, function: Any, args: tuple, timeout_s: float) -> list[Any]:
        """Each process's result, or a Failure."""
        self._start(n)
        self._n_runs += 1
        workers = self._workers[:n]
        for rank, (_, connection, _) in enumerate(workers):
            connection.send((self._environment(rank, n), function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < n:
            waiting = {workers[rank][1]: rank for rank in range(n) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    workers[rank][0].join(1)
                    results[rank] = Failure(f"died with exit code {workers[rank][0].exitcode}")
                if isinstance(results[rank], Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in set(range(n)) - set(results):
            results[rank] = Failure(f"hung after {timeout_s:.0f} s\n{self._stack(rank)}")
        gone = (isinstance(result, Failure) and result.error is None for result in results.values())
        if any(gone) or self._crowded(n):
            self.close()
        return [results[rank] for rank in range(n)]

    def close(self) -> None:
        """End the processes."""
        for process, connection, _ in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _crowded(self, n: int) -> bool:
        """Whether threads of past groups add up: torch keeps some, each wakes 100 times a second.

        New processes cost a tenth of a second.
        """
        return any(
            psutil.Process(w.pid).num_threads() > _MOST_THREADS for w, _, _ in self._workers[:n]
        )

    def _start(self, n: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            stack = self._folder / f"stack-{len(self._workers)}-{self._n_runs}"
            process = self._context.Process(target=_serve, args=(theirs, stack), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours, stack))

    def _environment(self, rank: int, n: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._n_runs),
        }

    def _stack(self, rank: int) -> str:
        process, _, stack = self._workers[rank]
        if process.pid is None or not process.is_alive():
            return "process is gone"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return stack.read_text()


class Group:
    """So many processes of the pool."""

    def __init__(self, pool: Pool, n: int) -> None:
        self._pool = pool
        self._n = n

    def outcomes(self, function: Any, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Each process's result of `function(world, *args)`, or its Failure."""
        return self._pool.outcomes(self._n, function, args, timeout_s)

    def run(self, function: Any, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Each process's result of `function(world, *args)`; raises ProcessFailed otherwise."""
        results = self.outcomes(function, *args, timeout_s=timeout_s)
        said = [
            f"rank {rank}: {result.text}"
            for rank, result in enumerate(results)
            if isinstance(result, Failure)
        ]
        if said:
            raise ProcessFailed("\n".join(said))
        return results


def _serve(connection: Connection, stack: Path) -> None:
    """Run what comes over the connection until it closes."""
    gc.freeze()  # what was imported needs no look at each collection
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            try:
                environment, function, args = connection.recv()
            except EOFError:
                return
            except Exception as error:
                connection.send(Failure(traceback.format_exc(), error))
                continue
            connection.send(_call(environment, function, args))


def _call(environment: dict[str, str], function: Any, args: tuple) -> Any:
    import pickle

    import torch

    from polyreme.cluster.accelerator import HostAccelerator
    from polyreme.runtime import mesh

    torch.set_num_threads(1)
    os.environ.update(environment)
    world = None
    try:
        world = mesh.open(HostAccelerator(), timeout_s=30)
        result = function(world, *args)
        pickle.dumps(result)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(text)
        result = Failure(text, error)
    finally:
        if world is not None:
            mesh.close(world)
        for name in environment:
            os.environ.pop(name, None)
        gc.collect()
        sys.stdout.flush()
    return result
