"""Plans found on Galvatron's own profiles beside those that its search found there.

python benchmarks/galvatron.py --data DIR    # with shipped/, synthetic/ and plans/ of its files

Both plans are priced by one account, each of its stages played in 1F1B. Hardware figures beyond two
hosts are extrapolated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from posed import posed

from polyreme.cluster.types import Cluster, DeviceType, Host, Link
from polyreme.planner.cost.unlike import UnlikeCost
from polyreme.planner.draft import Draft, describe_draft, read_draft
from polyreme.planner.galvatron import read_galvatron_draft
from polyreme.planner.prices import Prices
from polyreme.planner.search import search
from polyreme.profile.galvatron import read_galvatron
from polyreme.units import show_bytes

DEVICES = 8  # of a host
INPUTS = (  # its plan, hosts, GiB of a device, batch, samples/s that its own search predicts
    ("l7b_8g_24", 1, 24, 64, 12.656),
    ("l7b_8g_38", 1, 38, 64, 15.308),
    ("l7b_16g_24", 2, 24, 128, 27.127),
    ("l7b_64g_24", 8, 24, 512, 117.60),
)


def rows(data: Path) -> Iterator[str]:
    """A line for each plan: samples per second, bytes, how long ours was searched."""
    yield "input whose samples/s predicted memory search_s above_bound plan"
    for name, hosts, gib, batch, predicted in INPUTS:
        cluster = _cluster(hosts, gib)
        problem = posed("llama-7b", f"preset:{hosts}x{DEVICES}xH100", batch)
        folders = f"galvatron:{data / 'shipped'},{data / 'synthetic'}"
        profile = read_galvatron(folders, problem.graph, cluster, "bf16")
        given = problem.graph, cluster, profile, problem.workload
        plan = search(*given, problem.spec.parallel, top=1)[0]
        assert plan.search is not None
        cost = UnlikeCost(problem.graph, profile, Prices(*given).of)

        def line(draft: Draft, *, cost: UnlikeCost = cost, batch: int = batch) -> tuple[str, str]:
            causes = (cost.causes(draft, pipe) for pipe in range(draft.pp))
            held = max(sum(each.values()) for each in causes)
            return f"{batch / cost(draft).step_s:.2f}", show_bytes(held)

        theirs = read_galvatron_draft(f"galvatron:{data / 'plans' / name}.json", problem.graph)
        ours = read_draft(plan)
        speed, held = line(theirs)
        yield f"{name} theirs {speed} {predicted} {held} - - {describe_draft(theirs)}"
        speed, held = line(ours)
        above = plan.search.objective_s / plan.search.bound_s - 1
        took = f"{plan.search.search_s:.1f} {100 * above:.2g}%"
        yield f"{name} ours {speed} - {held} {took} {describe_draft(ours)}"


def _cluster(hosts: int, gib: int) -> Cluster:
    """So many hosts; links are those of the profile."""
    source = "the peer's profile"
    kind = DeviceType(name="peer", memory_bytes=gib * 2**30, source=source)
    link = Link(latency_s=1e-5, bandwidth_bytes_s=1e11, source=source)
    return Cluster(
        name=f"{hosts} hosts",
        device_types={"peer": kind},
        hosts=tuple(
            Host(name=f"host{index}", device_type="peer", n_devices=DEVICES)
            for index in range(hosts)
        ),
        intra=link,
        inter=link,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the peer's files")
    for row in rows(parser.parse_args().data):
        print(row, flush=True)
