"""AD-PSGD: models are averaged in pairs while gradients are computed."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING

from ..effects import Program
from ..topology.graph.kind import GraphKind, ever, unreached
from .kept import Kept, Said, tell
from .kind import State
from .peers import picked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..worker import Worker

_ASKS, _ANSWERS = 1.0, 2.0


class ADPSGD(Kept, frozen=True, kw_only=True, tag="ADPSGD", tag_field="kind"):
    """Each model takes its worker's gradients as they come, and is averaged with a neighbour's.

    Keepers fall into active and passive ones. An active one asks a passive neighbour, drawn at
    random, for the mean of their two models each time its worker goes on, unless it waits for an
    answer still; a passive one only answers. So nobody waits for one that waits. Keepers of
    even numbers are active if links between even and odd ones connect all; else those at even
    distances from the first are.

    Source: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    algorithm 1, with its bipartite graph that cannot deadlock.
    Differs: the one that asks adds half the difference to its model when it is told, so that
    gradients that came in the meantime stay; delays count averages, not updates of all.

    Attributes:
        graph: Who is whose neighbour.
    """

    def own(self) -> State:
        """Whether an answer is waited for."""
        return {"asks": False}

    def again(self, state: State) -> State:
        """What was asked of one that was begun anew is not answered."""
        return {**state, "asks": False}

    def begun(self, state: State, me: Worker) -> Program[State]:
        """An active keeper asks."""
        others = partners(self.graph, me.n)[me.rank - me.n]
        others = tuple(other for other in others if state["present"][str(other)])
        if state["asks"] or not others:
            return state
        numbers = (_ASKS, state["progress"])
        yield from tell(me.n + picked(others, state["step"], me), numbers, state["params"])
        return {**state, "asks": True}

    def heard(self, state: State, said: Said, me: Worker) -> Program[State]:
        """Half the difference of two models, which one adds and the other takes away."""
        what, progress = said.numbers
        params, vector, ahead = state["params"], said.vector, progress
        if what == _ASKS:
            vector, ahead = (vector - params) / 2, (progress - state["progress"]) / 2
            yield from tell(said.source, (_ANSWERS, -ahead), -vector)
        return {
            **state,
            "params": params + vector,
            "progress": state["progress"] + ahead,
            "version": state["version"] + 1,
            "asks": state["asks"] and what == _ASKS,
        }


@lru_cache(maxsize=64)
def partners(graph: GraphKind, n: int) -> tuple[tuple[int, ...], ...]:
    """Of each worker the passive neighbours that it asks: none, where it is passive itself."""
    import torch

    takes = ever(graph, n)
    near = takes | takes.T
    parity = [worker % 2 for worker in range(n)]
    apart = torch.tensor(parity)[:, None] != torch.tensor(parity)
    if unreached(near & apart) is not None:
        parity = [distance % 2 for distance in _distances(near.tolist())]
    return tuple(
        tuple(j for j in range(n) if near[i, j] and parity[j]) if not parity[i] else ()
        for i in range(n)
    )


def _distances(near: Sequence[Sequence[bool]]) -> list[int]:
    """Links between the first worker and each, in a graph that connects all."""
    found, queue = {0: 0}, deque([0])
    while queue:
        at = queue.popleft()
        for other, linked in enumerate(near[at]):
            if linked and other not in found:
                found[other] = found[at] + 1
                queue.append(other)
    return [found[worker] for worker in range(len(near))]
