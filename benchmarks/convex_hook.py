"""Puts the members of a served run into network namespaces; see convex_network.py.

Imported where members are forked and where the run begins. The environment says where: a list of
(namespace, address), a worker's in order of workers, the last that of servers and of the run.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

from polyreme.api import serving
from polyreme.runtime.transport import local

PLACES = "POLYREME_BENCHMARK_PLACES"
_CLONE_NEWNET = 0x40000000
_PORT = 29600


def _place(member: int) -> tuple[str, str]:
    places = json.loads(os.environ[PLACES])
    own = 0 <= member < len(places) - 1
    name, address = places[member] if own else places[-1]
    return name, address


def _of(_self: local.Address, member: int) -> str:
    return f"tcp://{_place(member)[1]}:{_PORT + member + 1}"


def be(*given: Any) -> Any:
    """What `serving.be` is, in the member's namespace."""
    name, _ = _place(given[4])
    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    return _be(*given)


_be = serving.be
serving.be = be
serving._PRELOAD = (*serving._PRELOAD, __name__)
local.Address.of = _of
