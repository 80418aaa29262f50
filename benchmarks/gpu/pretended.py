"""Devices of one host made into several hosts, which reach each other over a loopback socket."""

from __future__ import annotations

import os
from collections.abc import Mapping

_SEEN = "CUDA_VISIBLE_DEVICES"


def variables(
    n_devices: int, n_hosts: int, seen: str | None = None
) -> tuple[Mapping[str, str], ...]:
    """By rank, what makes its process one of a host of its own; nothing for a single host.

    The collectives' library takes processes for those of one host by its id, and is left no other
    way between hosts than the socket. A process sees the devices of its host alone, of those that
    this one sees (`seen`, comma-separated; unset: the environment's).

    >>> [each["NCCL_HOSTID"] for each in variables(4, 2)]
    ['host-0', 'host-0', 'host-1', 'host-1']
    """
    if n_hosts == 1:
        return ()
    n_local = n_devices // n_hosts
    assert n_local * n_hosts == n_devices, "hosts are alike"
    known = (seen or os.environ.get(_SEEN) or ",".join(map(str, range(n_devices)))).split(",")
    found = []
    for rank in range(n_devices):
        host, local = divmod(rank, n_local)
        found.append(
            {
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(n_local),
                "GROUP_RANK": str(host),
                "GROUP_WORLD_SIZE": str(n_hosts),
                _SEEN: ",".join(known[host * n_local : (host + 1) * n_local]),
                "NCCL_HOSTID": f"host-{host}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_NET": "Socket",
                "NCCL_IB_DISABLE": "1",
                "NCCL_MNNVL_ENABLE": "0",
            }
        )
    return tuple(found)
