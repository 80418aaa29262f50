"""Plans of other planners, priced by the same costs as ours."""

from __future__ import annotations

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from ..plan.ir import Plan, Workload, hash_inputs
from ..profile.record import Profile
from .account import estimate
from .draft import Draft
from .prices import Prices
from .space import write_plan


def price_draft(
    graph: LayerGraph, cluster: Cluster, profile: Profile, workload: Workload, draft: Draft
) -> Plan:
    """The plan of a draft, whatever the layouts of its layers, with its estimate.

    Whether it fits or not.

    Raises:
        ConfigError: it was made for another batch, or for more devices than there are.
    """
    violations = []
    if draft.global_batch != workload.global_batch:
        rule = f"was made for a batch of {draft.global_batch}, not {workload.global_batch}"
        legal = f"train.global_batch = {draft.global_batch}"
        violations.append(Violation(path="--price", value=None, rule=rule, legal=legal))
    if draft.n_devices > cluster.n_devices:
        rule = f"was made for {draft.n_devices} devices, there are {cluster.n_devices}"
        legal = f"a cluster of {draft.n_devices}"
        violations.append(Violation(path="--price", value=None, rule=rule, legal=legal))
    if violations:
        raise ConfigError(violations)
    prices = Prices(graph, cluster, profile, workload)
    cost = prices.pricing(draft).cost
    draft = cost.ordered(draft)
    return msgspec.structs.replace(
        write_plan(draft, workload),
        estimate=estimate(draft, cost(draft), prices),
        inputs_hash=hash_inputs(graph, cluster, workload),
        assumed=profile.assumed,
    )
