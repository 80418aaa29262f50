"""Workers on the virtual clock whose rounds are scripts, for tests that reckon times by hand."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from polyreme.algo.effects import Compute, Computed, Recv
from polyreme.algo.exchange import dense
from polyreme.algo.packet import Message
from polyreme.algo.vector import Layout
from polyreme.sim.driver import Simulation
from polyreme.sim.network import Network, Uniform
from workers import workers

PLAIN = Uniform(latency_s=0.5, bytes_per_s=100.0)
ONE = Layout.of({"w": (1,)})
Script = Callable[[Any, int], Generator[Any, Any, Any]]


class Scripted:
    """An algorithm and its sync: each round of a worker is a script of its own."""

    def __init__(self, script: Script) -> None:
        self.sync, self._script = self, script

    def round(self, algorithm, state, me):
        said = yield from self._script(me, state["step"])
        return {"step": state["step"] + 1, "said": [*state["said"], said]}


def message(n_bytes: int) -> Message:
    return dense([torch.zeros(n_bytes // 4)])


def run(script: Script, n: int, rounds: int = 1, network: Network = PLAIN, **more) -> Simulation:
    states = [{"step": 0, "said": []} for _ in range(n)]
    made = Simulation(Scripted(script), workers(n, ONE), states, _constant, network=network, **more)
    made.play(rounds)
    return made


def said(simulation: Simulation) -> list[Any]:
    return [state["said"] for state in simulation.states]


def take(source: int, n_bytes: int, timeout_s: float | None = None) -> Recv:
    return Recv(source=source, kinds=message(n_bytes).kinds, timeout_s=timeout_s)


def compute(batch: int) -> Compute:
    return Compute(params=torch.zeros(1), batch=batch)


def _constant(rank, params, batch):
    return Computed(gradient=torch.zeros(1), loss=0.0, weight=1.0)
