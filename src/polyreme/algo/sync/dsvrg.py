"""DSVRG: one worker after another walks; all give the gradient that it walks with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..effects import Local, Program
from ..task import Steps
from .scope import Anchored

if TYPE_CHECKING:
    import torch

    from ..worker import Worker


class DSVRG(Anchored, frozen=True, kw_only=True, tag="DSVRG", tag_field="kind"):
    """One worker in turn takes variance-reduced steps from the anchor, and hands on its model.

    All workers give the gradient at the anchor; others wait while one walks.

    Source: Lee, Lin, Ma and Yang 2017, "Distributed Stochastic Variance Reduced Gradient Methods by
    Sampling Extra Data with Replacement", algorithm 1.
    Differs: a walk draws among the worker's own samples, and none is moved beforehand, so that
    workers' samples should be alike; steps have the penalty's prox; each walk has an anchor of its
    own; the step is searched for, and a round that leads up is gone back on.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Steps of a walk, over the samples of its worker; unless given, they are
            searched for too: 1, 2, 4 or 10, whichever leads lowest on some of the samples for equal
            work, where a round's gradient and sums count as 2. Then twice as many from each round
            on that leaves more than 0.3 of the gap, up to 16, for as long as it helps.
        send: What is handed on: where the walk ends, or the mean of all models on the way.
    """

    def walked(self, asked: Steps, step: int, me: Worker) -> Program[torch.Tensor]:
        """Where the steps of the one whose turn it is lead: others add nothing to it."""
        import torch

        task = me.task
        assert task is not None
        own = torch.zeros_like(asked.start)
        if step % me.n == me.rank:
            own = yield Local(work=partial(task.steps, asked), batches=task.batches(asked.n))
        (model,) = yield from self.summed(own)
        return model
