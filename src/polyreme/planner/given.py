"""Plans of other planners, priced by the same costs as ours."""

from __future__ import annotations

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from ..plan.ir import Estimate, Plan, Workload, hash_inputs
from ..plan.order import ORDERS
from ..plan.play import Costs
from ..profile.record import Profile
from .cost.unlike import UnlikeCost
from .draft import Draft
from .hybrid import Prices
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
    cost = UnlikeCost(graph, profile, Prices(graph, cluster, profile, workload).of)
    time = cost(draft)
    causes = [cost.causes(draft, pipe) for pipe in range(draft.pp)]
    n = draft.strategy.n_devices
    if draft.stages and not draft.actions:
        alike = Costs.equal(len(draft.stages))
        actions = ORDERS[draft.order].actions(draft.pp, draft.microbatches, alike)
        draft = msgspec.structs.replace(draft, actions=actions)
    return msgspec.structs.replace(
        write_plan(draft, workload),
        estimate=Estimate(
            step_s=time.step_s,
            compute_s=time.compute_s,
            comm_s=time.comm_s,
            exposed_comm_s=time.exposed_comm_s,
            memory=tuple(each for each in causes for _ in range(n)),
            n_unused=cluster.n_devices - draft.n_devices,
        ),
        inputs_hash=hash_inputs(graph, cluster, workload),
        assumed=profile.assumed,
    )
