"""Compression and feedback inside torch's DistributedDataParallel: ``pr.ddp_hook(algorithm)``."""

# No annotations as text: DDP looks at those of the hook.

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..algo.compose import DataParallel
from ..algo.feedback.kind import FeedbackKind
from ..algo.legal import checked
from ..algo.sync.every_step import EveryStep
from ..errors import ConfigError, Violation
from ..spec.strict import read
from .state import HookState

Hook = Callable[[HookState, Any], "torch.futures.Future[torch.Tensor]"]
_PARTS = ("sync", "topology", "compress", "feedback", "aggregate")


def ddp_hook(
    data_parallel: DataParallel | Mapping[str, Any],
    *,
    lr: float | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[HookState, Hook]:
    """What `DistributedDataParallel.register_comm_hook` takes, for one model.

    Gradients are compressed, exchanged as packed bytes and aggregated, bucket by bucket ("per
    model" means per bucket). The rule is the user's own optimizer; only its learning rate matters
    here, to feedbacks that keep steps: set `state.lr` whenever a scheduler changes it.

    Args:
        data_parallel: The algorithm, or its tables as in a spec.
        lr: Learning rate; unless given, that of the algorithm's rule.
        seed: Of whatever is drawn; the same on all workers.
        group: The process group of the DDP model; the default one unless given.

    Raises:
        ConfigError: The algorithm is wrong, or is none that a hook can play.
    """
    algorithm = data_parallel
    if not isinstance(algorithm, DataParallel):
        algorithm = _read(algorithm)
    found = refused(algorithm)
    if not found and dist.is_initialized():
        found = algorithm.refused(dist.get_world_size(group))
    if found:
        raise ConfigError(found)
    return HookState(algorithm, lr=lr, seed=seed, group=group), hook


def hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The aggregate of a bucket's gradients."""
    return state.reduce(bucket)


def refused(algorithm: DataParallel) -> list[Violation]:
    """Everything of an algorithm that a hook cannot play."""
    for part in _PARTS:
        checked(getattr(algorithm, part), f"data_parallel.{part}")
    found = [each for each in algorithm.check() if not _of_the_rule(each)]

    def no(part: str, value: object, rule: str, legal: str) -> None:
        path = f"data_parallel.{part}"
        found.append(Violation(path=path, value=value, rule=rule, legal=legal))

    inside = "and a hook sees one step's gradients alone"
    sync, topology, feedback = algorithm.sync, algorithm.topology, algorithm.feedback
    if type(sync) is not EveryStep:
        no("sync", type(sync).__name__, f"plays whole steps, {inside}", "EveryStep")
    if not topology.exact:
        legal = "AllReduce, Ring, or any other topology where all workers end with the same"
        no("topology", type(topology).__name__, f"mixes models, {inside}", legal)
    if type(feedback).at is not FeedbackKind.at:
        rule = f"takes gradients elsewhere than at the model's parameters, {inside}"
        no("feedback", type(feedback).__name__, rule, "ErrorFeedback, or any other")
    if not algorithm.aggregate.by_entry:
        rule = "compares whole gradients, and a hook sees one bucket at a time"
        legal = "Mean, or any other that goes entry by entry"
        no("aggregate", type(algorithm.aggregate).__name__, rule, legal)
    if algorithm.local_clip_norm is not None:
        rule = "bounds whole gradients, and a hook sees one bucket at a time"
        no("local_clip_norm", algorithm.local_clip_norm, rule, "leave it out")
    return found


class _Given(msgspec.Struct):
    data_parallel: DataParallel


def _read(tables: Mapping[str, Any]) -> DataParallel:
    given, violations = read({"data_parallel": tables}, _Given)
    violations = [each for each in violations if not _of_the_rule(each) or "rule" in tables]
    if violations:
        raise ConfigError(violations)
    algorithm: DataParallel = given.data_parallel
    return algorithm


def _of_the_rule(violation: Violation) -> bool:
    """The rule is the user's own optimizer: how it goes with other parts is theirs to know."""
    return violation.path.startswith("data_parallel.rule")
