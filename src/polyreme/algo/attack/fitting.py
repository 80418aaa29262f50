"""Which attacks a run can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from ...errors import Violation
from ..legal import tag
from ..sync.peers import Peers
from .kind import AttackKind

if TYPE_CHECKING:
    from ..compose import DataParallel


def misnamed(attack: Sequence[AttackKind], n: int, path: str) -> list[Violation]:
    """What is wrong with attacks among n workers: one of each worker at most, some honest."""
    found: list[Violation] = []
    named: dict[int, str] = {}
    for each, below in _placed(attack, path):
        found += each.refused(n, below)
        for number, worker in enumerate(each.workers):
            if named.setdefault(worker, below) != below:
                rule, where = f"is hostile in {named[worker]} already", f"{below}.workers[{number}]"
                found.append(Violation(path=where, value=worker, rule=rule, legal="leave it out"))
    if not found and len(named) == n:
        rule, legal = f"leaves none of the {n} workers honest", "fewer hostile workers"
        found.append(Violation(path=path, value=len(named), rule=rule, legal=legal))
    return found


def unfit(
    attack: Sequence[AttackKind], n: int, algorithm: DataParallel, path: str
) -> list[Violation]:
    """Attacks that are not played under an algorithm of n workers."""
    from . import Attack

    fit = [kind for kind in get_args(Attack) if not _unfit(kind, n, algorithm)]
    legal = ", ".join(f'"{kind.__struct_config__.tag}"' for kind in fit)
    return [
        Violation(path=f"{below}.kind", value=tag(each), rule=why, legal=legal)
        for each, below in _placed(attack, path)
        if (why := _unfit(each, n, algorithm))
    ]


def _placed(attack: Sequence[AttackKind], path: str) -> Iterator[tuple[AttackKind, str]]:
    """Each with where it stands."""
    for at, each in enumerate(attack):
        yield each, path if len(attack) == 1 else f"{path}[{at}]"


def _unfit(attack: AttackKind | type[AttackKind], n: int, algorithm: DataParallel) -> str:
    """Why an attack is not played under an algorithm, if it is not."""
    sync, topology = algorithm.sync, algorithm.topology
    name = f"data_parallel.sync {tag(sync)}"
    if attack.of_batches:
        return ""
    if isinstance(sync, Peers):
        return f"is of gradients that are sent, and under {name} models go from worker to worker"
    if not topology.exact:
        return f"is of gradients that are sent, and data_parallel.topology {tag(topology)} has none"
    if not attack.sees:
        return ""
    if sync.n_servers(n):
        return f"sees what all send in one step, and under {name} each comes alone"
    if algorithm.compress.in_rounds:
        return f"needs vectors, and data_parallel.compress {tag(algorithm.compress)} sends sums"
    if attack.whole and getattr(topology, "servers", 1) > 1:
        return "needs vectors whole, and data_parallel.topology.servers share them"
    return ""
