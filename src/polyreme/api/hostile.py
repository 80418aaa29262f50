"""Attacks of a spec: what a run plays of them, and what is said of it."""

from __future__ import annotations

import sys

import msgspec

from .. import spec as specs
from ..algo.attack.fitting import misnamed, unfit
from ..algo.legal import tag
from ..errors import ConfigError, Violation
from ..plan.ir import Plan
from ..runtime.place import is_launched, read_place

_PATH = "simulate.attack"


def spared(spec: specs.Spec) -> specs.Spec:
    """The spec without attacks, of which a real run plays none unless it is told to."""
    if not spec.simulate.attacks:
        return spec
    _say(f"{_PATH} is not played: all workers are honest (--attack plays it)")
    simulate = msgspec.structs.replace(spec.simulate, attack=())
    return msgspec.structs.replace(spec, simulate=simulate)


def attacked(spec: specs.Spec, devices: int | None, plan: Plan | None) -> specs.Spec:
    """The spec of a real run that plays its attacks; all its workers are replicas.

    Raises:
        ConfigError: There are no attacks, or they are not for its workers.
    """
    from . import steps
    from .problem import here

    attacks, parallel = spec.simulate.attacks, spec.parallel
    if not attacks:
        rule, legal = f"plays {_PATH}, and the spec has none", f"leave it out, or give {_PATH}"
        raise ConfigError([Violation(path="--attack", value=None, rule=rule, legal=legal)])
    if plan is not None:
        n = steps.n_replicas(plan)
    else:
        n = parallel.replica or max(1, here(spec, devices)[0].n_devices // parallel.inside)
        parallel = msgspec.structs.replace(parallel, replica=n, shard=parallel.shard or 1)
    found = [*misnamed(attacks, n, _PATH), *unfit(attacks, n, spec.data_parallel, _PATH)]
    if found:
        raise ConfigError(found)
    announced(spec)
    return msgspec.structs.replace(spec, parallel=parallel)


def announced(spec: specs.Spec) -> None:
    """Say who is hostile, and where these are more than a robust aggregate bears."""
    for each in spec.simulate.attacks:
        who = ", ".join(map(str, each.workers))
        many = len(each.workers) > 1
        _say(f"worker{'s' * many} {who} {'are' if many else 'is'} hostile: {tag(each)}")
    aggregate = spec.data_parallel.aggregate
    n_hostile = sum(len(each.workers) for each in spec.simulate.attacks)
    if (aggregate.robust or aggregate.bears) and n_hostile > aggregate.bears:
        _say(
            f"{n_hostile} workers are hostile, and data_parallel.aggregate {tag(aggregate)} bears "
            f"{aggregate.bears}"
        )


def _say(what: str) -> None:
    if not is_launched() or read_place().rank == 0:
        sys.stderr.write(f"polyreme: {what}\n")
