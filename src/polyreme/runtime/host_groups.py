"""Process groups over host memory, with one thread that carries out their collectives.

torch gives them two, which note the name of each collective that they have completed in one string
without a lock. Names of more than 15 characters lie on the heap, and what one thread writes after
the other has freed it lands in memory of something else: two of some 2,100 short runs on busy cores
died of it, sharded ones. Seen in torch 2.13 (`ProcessGroupGloo::runLoop` and a core file in which a
freed chunk holds "BROADCAST"); 2.11 makes its groups in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from ..cluster.accelerator import HOST_BACKEND

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NAME = f"ProcessGroup{HOST_BACKEND.title()}"
_Torch: Any = getattr(c10d, _NAME, None)  # a build of torch may lack it


def use_one_thread(interfaces: Sequence[str] = ()) -> None:
    """Make process groups of this process so from now on, over these network interfaces.

    Without any, over the one that the host's name leads to, as torch does.
    """
    if _Torch is None:
        return

    class OneThread(_Torch):  # type: ignore[misc]
        """torch's process group, with one thread."""

        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = _Torch._Options()
            options._threads = 1
            options._timeout = timeout
            options._devices = [_Torch.create_device(interface=name) for name in interfaces] or [
                _Torch.create_default_device()
            ]
            super().__init__(store, rank, size, options)

    setattr(c10d, _NAME, OneThread)
