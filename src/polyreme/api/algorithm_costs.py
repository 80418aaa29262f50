"""What members of algorithms cost, by trying them on tensors at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..algo import exchange
from ..algo.compose import DataParallel
from ..algo.compress.kind import CompressorKind
from ..algo.draw import Draw
from ..algo.effects import (
    Agree,
    Combine,
    Compute,
    Computed,
    Local,
    Program,
    Received,
    Recv,
    Seen,
    Send,
    Sum,
    SumShards,
)
from ..algo.packet import Like, Message, Packet
from ..algo.vector import Layout
from ..algo.worker import Worker
from ..convex.problem import Objective, Penalty
from ..convex.shard import Shard
from ..convex.task import LinearTask
from ..data.rows import Rows

N = 8
SHAPE = (256, 256)


def gradient(step: int) -> torch.Tensor:
    """One at random."""
    return 0.01 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def packed(compress: CompressorKind) -> float:
    """Bytes of a packet, in the mean of ten steps under error feedback."""
    left = torch.zeros(SHAPE)
    state, sizes = compress.init(Like.of(left)), []
    for step in range(10):
        x = gradient(step) + left
        buffers, state = compress.encode(x, state, Draw(seed=0, worker=0, step=step).at(0))
        packet = Packet(buffers=buffers, like=Like.of(x), kind=compress)
        left = x - packet.decode()
        sizes.append(packet.nbytes)
    return sum(sizes) / len(sizes)


def exchanges(algorithm: DataParallel, params: torch.Tensor) -> str:
    """How often one worker alone, given gradients at random, exchanges a vector."""
    me = worker(params, n=1)
    state, given_bytes = algorithm.sync.init(algorithm, params, me), 0
    generator = torch.Generator().manual_seed(0)
    while state["step"] < 64:
        program = algorithm.sync.round(algorithm, state, me)
        answer: Any = None
        while True:
            try:
                effect: Any = program.send(answer)
            except StopIteration as end:
                state = end.value
                break
            match effect:
                case Compute():
                    found = torch.randn(params.shape, generator=generator)
                    answer = Computed(gradient=found, loss=1.0, weight=1.0, n_samples=1)
                case Agree():
                    answer = Seen.of([effect.batches])
                case Combine():
                    given_bytes += effect.message.nbytes
                    answer = effect.function([effect.message])
                case Sum():
                    given_bytes += effect.message.nbytes
                    answer = effect.message
                case SumShards():
                    answer = effect.partial
                case Local():
                    answer = effect.work()
                case _:
                    answer = None
    often = given_bytes / params.nbytes / state["step"]
    return f"{often:.3g} exchange{'' if f'{often:.3g}' == '1' else 's'} a step"


def given(compress: CompressorKind, x: torch.Tensor) -> int:
    """Bytes that the second of two alike workers gives in an exchange in rounds."""
    n_bytes = 0

    def combining(tensors: Sequence[torch.Tensor]) -> Program[list[torch.Tensor]]:
        nonlocal n_bytes
        n_bytes += exchange.dense(tensors).nbytes
        return list(tensors)
        yield  # a program that asks for nothing

    me = Worker(rank=1, n=2, layout=Layout.of({"w": SHAPE}), seed=0, lr=lambda _: 0.1)
    draws = [Draw(seed=0, worker=1, step=0)]
    program = compress.exchange([x], [compress.init(Like.of(x))], draws, combining, me)
    answer: Any = None
    said = Message(packets=())
    while True:
        try:
            effect = program.send(answer)
        except StopIteration:
            return n_bytes
        answer = None
        if isinstance(effect, Send):
            said, n_bytes = effect.message, n_bytes + effect.message.nbytes
        elif isinstance(effect, Recv):
            answer = Received(source=effect.source, message=said)


def worker(params: torch.Tensor, n: int = N) -> Worker:
    """One of n; it has a small linear problem if parameters are float64."""
    layout = Layout.of({"w": tuple(params.shape)})
    task = sample_task(len(params)) if params.dtype == torch.float64 else None
    return Worker(rank=0, n=n, layout=layout, seed=0, lr=lambda _: 0.1, n_samples=64, task=task)


def sample_task(n_features: int) -> LinearTask:
    """64 rows of up to 8 numbers each, with labels."""
    rng = np.random.default_rng(0)
    n = 64
    columns = np.sort(rng.integers(0, n_features, (n, 8)), axis=1)
    kept = [np.unique(row) for row in columns]
    indices = np.concatenate(kept).astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in kept])]).astype(np.int64)
    rows = Rows(
        indptr=indptr,
        indices=indices,
        values=rng.normal(size=len(indices)),
        n_features=n_features,
    )
    y = np.where(rng.random(n) < 0.5, -1.0, 1.0)
    return LinearTask(
        shard=Shard(objective=Objective(penalty=Penalty(l2=1e-2)), rows=rows, y=y), batch=8
    )
