"""From a spec to what is planned and run: the graph, the cluster, the workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..cluster import accelerator as accelerators
from ..cluster.detect import detect
from ..cluster.parse import first, parse
from ..data import objective
from ..data.sparse_source import SparseSource
from ..errors import ConfigError, Violation
from ..plan.ir import Precision, Workload
from ..planner.refusals import allowed_degrees, of_the_model
from ..runtime.place import is_launched, read_place
from ..sample import SampleSpec
from ..spec import Spec, check
from ..spec.fit import matched
from ..spec.partial import checked
from ..spec.rules import impossible, workers_without_sample
from .linear_of import of_two_classes

if TYPE_CHECKING:
    from ..cluster.accelerator import Accelerator
    from ..cluster.types import Cluster
    from ..graph.layer import LayerGraph


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a spec asks for on a cluster. `accelerator` is None where the cluster is elsewhere."""

    spec: Spec
    graph: LayerGraph
    cluster: Cluster
    accelerator: Accelerator | None
    workload: Workload


def pose(
    spec: Spec,
    *,
    cluster: str | None = None,
    devices: int | None = None,
    machines: tuple[Cluster, Accelerator] | None = None,
    apart: bool = False,
) -> Problem:
    """The problem of a spec on the named cluster (see `cluster.parse`), or on this machine.

    `machines` is what `here` found before, in another process of the same command. `apart` is set
    where each device is a worker that has the whole model.

    Raises:
        ConfigError: spec, model, data and cluster do not go together; every reason.
    """
    there, accelerator = machines or machines_of(spec, cluster, devices)
    violations = [*check(spec, there.n_devices, trusted=("data",))]
    violations += checked(partial(split, spec, there.n_devices), "parallel") if apart else []
    if violations and about_fixes(violations) and spec.parallel.plan is None:
        try:
            graph = posed(spec, there, accelerator).graph
        except ConfigError as error:
            raise ConfigError([*violations, *error.violations]) from None
        violations = with_model(spec, graph, there.n_devices, violations)
    if violations:
        raise ConfigError(violations)
    return posed(spec, there, accelerator)


def with_model(
    spec: Spec, graph: LayerGraph, n_devices: int, violations: Sequence[Violation]
) -> list[Violation]:
    """Violations of [parallel] alone, with legal degrees that the model's layers allow too.

    What the model and the batch say of other fixes is beside them.
    """
    allowed = allowed_degrees(graph, spec.parallel, n_devices)
    narrowed = {(each.path, each.rule): each for each in impossible(spec, n_devices, allowed)}
    found = [narrowed.get((each.path, each.rule), each) for each in violations]
    said = {each.path for each in found}
    theirs = of_the_model(graph, spec.train.global_batch, spec.parallel, n_devices)
    return [*found, *(each for each in theirs if each.path not in said)]


def about_fixes(violations: Sequence[Violation]) -> bool:
    """Whether fixes of [parallel] are all that is wrong, so that the model can be asked too."""
    paths = [each.path for each in violations]
    return all(path.startswith("parallel.") and path != "parallel.plan" for path in paths)


def posed(spec: Spec, there: Cluster, accelerator: Accelerator | None) -> Problem:
    """The problem of a spec that is known to be right.

    Raises ConfigError for model and data, and where the algorithm's sync is for a larger model.
    """
    spec = with_workers(matched(spec), there.n_devices)
    graph = spec.model.graph(_sample(spec))
    spec.data_parallel.sync.fits(graph.param_count)
    return Problem(
        spec=spec,
        graph=graph,
        cluster=there,
        accelerator=accelerator,
        workload=Workload(
            global_batch=spec.train.global_batch,
            seq_len=spec.train.seq_len or 1,
            precision=_precision(spec, there, accelerator),
            optimizer_states=spec.data_parallel.n_vectors(spec.parallel.replica or 1),
            optimizer_scalars=spec.data_parallel.rule.n_scalars,
            by_entry=spec.data_parallel.is_plain and spec.data_parallel.rule.by_entry,
        ),
    )


def with_workers(spec: Spec, n_devices: int) -> Spec:
    """An algorithm's workers are replicas, as many as there are devices for."""
    plain = spec.data_parallel.is_plain and not spec.model.trains_by_program
    if plain or spec.parallel.plan is not None:
        return spec
    given = spec.parallel
    replica = given.replica or max(1, n_devices // given.inside)
    parallel = msgspec.structs.replace(given, replica=replica, shard=given.shard or 1)
    return msgspec.structs.replace(spec, parallel=parallel)


def graph_of(spec: Spec) -> LayerGraph:
    """The model of a spec, wherever it will be trained. Raises ConfigError for model and data."""
    spec = matched(spec)
    return spec.model.graph(_sample(spec))


def machines_of(
    spec: Spec, cluster: str | None, devices: int | None
) -> tuple[Cluster, Accelerator | None]:
    """The named cluster, the spec's, or this machine with its accelerator."""
    named = parse(cluster, "--cluster") if cluster else spec.cluster.cluster()
    if named is not None:
        return (first(named, devices, "--devices") if devices else named), None
    return here(spec, devices)


def simulated_of(spec: Spec, workers: int) -> tuple[Cluster, Accelerator]:
    """The cluster that so many simulated workers stand for, a host each like this one."""
    accelerator = _accelerator(spec)
    return detect(accelerator, 1, n_hosts=workers), accelerator


def split(spec: Spec, workers: int) -> Iterator[Violation]:
    """What of a split would be left aside: each worker is one device.

    All of them train, with a part of the batch each.
    """
    parallel = spec.parallel
    if parallel.plan is not None:
        rule = "is not split here: each worker has the whole model on one device"
        yield Violation(path="parallel.plan", value=parallel.plan, rule=rule, legal="leave it out")
        return
    for axis in ("shard", "tp", "cp", "ep", "pp"):
        degree = getattr(parallel, axis)
        if degree is not None and degree > 1:
            rule = "is not split here: each worker has the whole model on one device"
            yield Violation(path=f"parallel.{axis}", value=degree, rule=rule, legal="1")
    if parallel.replica not in (None, workers):
        rule = "is not the number of workers"
        legal = f"{workers} (or leave it out)"
        yield Violation(path="parallel.replica", value=parallel.replica, rule=rule, legal=legal)
    elif parallel.replica is None and spec.data_parallel.is_plain:  # others are judged by `check`
        yield from workers_without_sample(spec, workers)


def here(spec: Spec, devices: int | None) -> tuple[Cluster, Accelerator]:
    """This machine: as many devices as asked for; under a launcher, its processes."""
    accelerator = _accelerator(spec)
    if is_launched():
        place = read_place()
        return (
            detect(accelerator, place.n_local, n_hosts=place.n_ranks // place.n_local),
            accelerator,
        )
    wanted = devices or spec.cluster.devices
    if wanted is None and accelerator.on_host:
        wanted = spec.cluster.cpu_processes or min(accelerator.count(), spec.train.global_batch)
    return detect(accelerator, wanted), accelerator


def _accelerator(spec: Spec) -> Accelerator:
    """This machine's; linear models, and those alike, run on its processors."""
    on_host = spec.model.trains_by_program
    return accelerators.detect(accelerators.HOST_TYPE if on_host else None)


def _precision(spec: Spec, cluster: Cluster, accelerator: Accelerator | None) -> Precision:
    """The spec's, or for "auto" bf16 where the devices have it."""
    if spec.train.precision != "auto":
        return spec.train.precision
    if spec.model.trains_by_program:
        return "fp64"
    if accelerator is not None:
        return "bf16" if accelerator.has_bf16() else "fp32"
    kinds = cluster.device_types.values()
    return "bf16" if all("bf16" in kind.peak_flops for kind in kinds) else "fp32"


def _sample(spec: Spec) -> SampleSpec:
    """What the data offer; of text that is not here, its shape is known all the same."""
    missing = spec.data.check()
    if not missing:
        source = spec.data.open(spec.train.seq_len, spec.train.seed)
        if isinstance(source, SparseSource) and of_two_classes(spec):
            source.signs()
        return source.sample
    if not spec.data.needs_seq_len or spec.train.seq_len is None:
        raise ConfigError(missing)
    gives = spec.data.gives
    assert gives.objective is not None
    n_classes = gives.classes_for(gives.objective) or 1
    return objective.sample(gives.objective, spec.train.seq_len, n_classes)


def not_here(problem: Problem) -> ConfigError:
    """The error for measuring or training on machines that are elsewhere."""
    return ConfigError(
        [
            Violation(
                path="cluster",
                value=problem.cluster.name,
                rule="is not this machine, so nothing can be measured or trained on it",
                legal="--assume, a profile measured there, or no cluster (this machine)",
            )
        ]
    )
