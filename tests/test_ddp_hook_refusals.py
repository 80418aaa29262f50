"""What the hook for torch's DDP refuses, with what it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyreme as pr
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Sign, TopK
from polyreme.algo.feedback import DEF, DGC
from polyreme.algo.sync import LocalSteps
from polyreme.algo.topology import Gossip, ParameterServer
from polyreme.errors import ConfigError

N = 2


@pytest.mark.parametrize(
    ("algorithm", "path"),
    [
        (DataParallel(sync=LocalSteps()), "data_parallel.sync"),
        (DataParallel(topology=Gossip()), "data_parallel.topology"),
        (DataParallel(feedback=DEF()), "data_parallel.feedback"),
        (DataParallel(local_clip_norm=1.0), "data_parallel.local_clip_norm"),
        (DataParallel(compress=Sign(), feedback=DGC()), "data_parallel.feedback.masking"),
        (DataParallel(compress=TopK(ratio=2.0)), "data_parallel.compress.ratio"),
        ({"sync": {"kind": "LocalSteps"}}, "data_parallel.sync"),
        ({"compress": {"kind": "TopK", "ratioo": 0.1}}, "data_parallel.compress.ratioo"),
        ({"compres": {"kind": "TopK"}}, "data_parallel.compres"),
    ],
)
def test_what_a_hook_cannot_do_is_refused_with_what_it_can(algorithm: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pr.ddp_hook(algorithm)
    (violation,) = caught.value.violations
    assert violation.path == path
    assert violation.legal


def _too_many_servers(world: Any) -> str:
    try:
        pr.ddp_hook(DataParallel(topology=ParameterServer(servers=3)))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_topology_for_more_workers_is_refused_at_once(pool: Any) -> None:
    assert "data_parallel.topology.servers: 3" in pool(N).run(_too_many_servers)[0]


def test_a_state_that_is_none_is_refused() -> None:
    state, _ = pr.ddp_hook(DataParallel())
    with pytest.raises(ConfigError, match="lacks buckets, lr, parameters, step"):
        state.load_state_dict({})


@pytest.mark.parametrize("lr", ["a", math.nan, math.inf, -1.0, None, [0.1]])
def test_what_is_no_learning_rate_is_refused_when_it_is_set(lr: Any) -> None:
    """It made parameters NaN steps later."""
    state, _ = pr.ddp_hook(DataParallel())
    with pytest.raises(ConfigError, match="is no learning rate"):
        state.lr = lr
    state.lr = torch.tensor(0.5)
    assert state.lr == 0.5
