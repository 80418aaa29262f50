"""Scores the model on the held-out samples, which the ranks share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..data.order import share
from ..data.source import Source
from ..graph.loss import IGNORE_LABEL, cross_entropy
from .apply.data import Applied
from .feed import Feed, heldout
from .mesh import World

_BATCHES_BETWEEN = 8  # asking all ranks whether to go on costs a small exchange


def evaluate(
    applied: Applied,
    world: World,
    source: Source,
    feed: Feed,
    *,
    data_rank: int,
    batch: int,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Metrics of the stage as it is by name; all ranks call it together and get the same.

    `data_rank` says which share of the samples is this rank's.

    Always ``heldout_loss`` (nats per label), for classifiers ``test_accuracy`` too: the share of
    labels that are the arg-max, whose counts are exact whatever the number of ranks. The data's
    own baselines stand beside. Without held-out samples there is nothing. `stop` says whether
    this rank wants to end: once one does, all break off, and None is returned.
    """
    if not source.n_heldout:
        return {}
    everything = np.arange(source.n_heldout, dtype=np.int64)
    ours = share(everything, data_rank, world.n_ranks)
    n_batches = -(-len(share(everything, 0, world.n_ranks)) // batch)  # the first has most
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    applied.stage.eval()
    stopped = False
    with torch.no_grad():
        for number, fields in enumerate(heldout(source, ours, batch, n_batches)):
            if stop is not None and number % _BATCHES_BETWEEN == 0 and _any(stop(), applied, world):
                stopped = True
                break
            if fields is None and not applied.units:
                continue
            microbatch = feed.microbatch(fields)
            logits = applied.stage(microbatch.fields)
            loss_sum, weight = cross_entropy(logits, microbatch.labels)
            counted = microbatch.labels != IGNORE_LABEL
            right = (logits.argmax(-1) == microbatch.labels) & counted
            sums += torch.stack([loss_sum.double(), weight.double(), right.sum().double()])
    applied.reshard()
    applied.stage.train()
    if stopped:
        return None
    alone = world.group is None
    loss_sum_, weight_, right_ = sums.tolist() if alone else applied.traffic.sums(sums, world.group)
    weight_ = weight_ or float("nan")
    metrics = {"heldout_loss": loss_sum_ / weight_}
    if source.metric == "test_accuracy":
        metrics["test_accuracy"] = right_ / weight_
    return metrics | dict(source.baselines())


def _any(wish: bool, applied: Applied, world: World) -> bool:
    """Whether a rank has the wish."""
    if world.group is None:
        return wish
    flag = torch.tensor([float(wish)], dtype=torch.float64, device=world.device)
    return applied.traffic.sums(flag, world.group)[0] > 0
