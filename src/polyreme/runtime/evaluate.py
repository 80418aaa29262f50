"""Scores the model on the held-out samples, which the ranks share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..data.order import share
from ..data.source import Source
from ..graph.loss import IGNORE_LABEL, cross_entropy
from ..plan.ir import Action
from .applied import Applied
from .feed import Feed, heldout
from .mesh import World
from .passes import Microbatch
from .wires import Wires, given, taken

_BATCHES_BETWEEN = 8  # asking all ranks whether to go on costs a small exchange


def evaluate(
    applied: Applied,
    world: World,
    source: Source,
    feed: Feed,
    *,
    data_rank: int,
    n_data: int,
    batch: int,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Metrics of the stages as they are by name; all ranks call it together and get the same.

    `data_rank` of `n_data` says which share of the samples is this rank's.

    Always ``heldout_loss`` (nats per label), for classifiers ``test_accuracy`` too: the share of
    labels that are the arg-max, whose counts are exact whatever the number of ranks. The data's
    own baselines stand beside. Without held-out samples there is nothing. `stop` says whether
    this rank wants to end: once one does, all break off, and None is returned.
    """
    if not source.n_heldout:
        return {}
    everything = np.arange(source.n_heldout, dtype=np.int64)
    ours = share(everything, data_rank, n_data)
    n_batches = -(-len(share(everything, 0, n_data)) // batch)  # the first has most
    applied.stage.eval()
    scores = _Scores(applied)
    stopped = False
    with torch.no_grad():
        for number, fields in enumerate(heldout(source, ours, batch, n_batches)):
            if stop is not None and number % _BATCHES_BETWEEN == 0 and _any(stop(), applied, world):
                stopped = True
                break
            if fields is not None or applied.fills:
                scores.add(feed.microbatch(fields))
    applied.reshard()
    applied.stage.train()
    if stopped:
        return None
    sums = scores.sums
    alone = world.group is None
    loss_sum_, weight_, right_ = sums.tolist() if alone else applied.traffic.sums(sums, world.group)
    weight_ = weight_ or float("nan")
    metrics = {"heldout_loss": loss_sum_ / weight_}
    if applied.loss is not None and not applied.loss.classifies:
        return metrics
    if source.metric == "test_accuracy":
        metrics["test_accuracy"] = right_ / weight_
    return metrics | dict(source.baselines())


class _Scores:
    """Runs batches through the stages; `sums` are of losses, labels that carry one, right ones."""

    def __init__(self, applied: Applied) -> None:
        self._applied, self._wires = applied, Wires(applied, whole=True)
        self.sums = torch.zeros(3, dtype=torch.float64, device=applied.device)

    def add(self, microbatch: Microbatch) -> None:
        """Run one; stages follow one another, so that a rank may come twice."""
        grid, pipe = self._applied.grid, self._applied.places.cell.pipe
        n_stages = len(grid.holders)
        orders = [
            [Action(stage=s, kind="F") for s, held in enumerate(grid.holders) if held[0] == each]
            for each in range(grid.pp)
        ]
        self._wires.begin(orders, {0: microbatch.n_rows})
        for action in orders[pipe]:
            before, after = taken(action, n_stages), given(action, n_stages)
            came = [] if before is None else self._wires.take(before)
            out = self._applied.stage(microbatch.fields, *came, number=action.stage)
            if after is None:
                self._score(out, microbatch.labels)
            else:
                outs = out if isinstance(out, tuple) else (out,)
                forms = self._applied.forms[action.stage]
                sent = [t.to(dtype) for t, (dtype, _) in zip(outs, forms, strict=True)]
                self._wires.send(after, sent)
        self._wires.end()

    def _score(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        loss = self._applied.loss
        loss_sum, weight = (loss or cross_entropy)(logits, labels)
        highest = logits.argmax(-1) if loss is None else loss.argmax(logits)
        right = (highest == labels) & (labels != IGNORE_LABEL)
        if self._applied.places.cell.tp == 0:  # other tensor parts come to the same
            self.sums += torch.stack([loss_sum.double(), weight.double(), right.sum().double()])


def _any(wish: bool, applied: Applied, world: World) -> bool:
    """Whether a rank has the wish."""
    if world.group is None:
        return wish
    flag = torch.tensor([float(wish)], dtype=torch.float64, device=world.device)
    return applied.traffic.sums(flag, world.group)[0] > 0
