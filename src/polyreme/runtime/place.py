"""Where a process stands among all, without torch.

Of the environment, only this file and `mesh` read what launchers say: torchrun's names, or Slurm's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RunError
from .record import RECORD


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands among all, as its launcher says."""

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0
    n_local: int = 1


def read_place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place; a lone process where no launcher set one.

    Raises RunError if the environment names a rank but not the number of processes.

    >>> read_place({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}).n_ranks
    4
    """
    environment = os.environ if environment is None else environment
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # srun; sbatch's shell has none
        names = (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE",
        )
    else:
        return Place()
    if names[1] not in environment:
        raise RunError(f"{names[0]} is set but {names[1]} is not: how many processes are there?")
    rank, n_ranks = int(environment[names[0]]), int(environment[names[1]])
    local_rank = int(environment.get(names[2], rank))
    n_local = int(environment.get(names[3], str(n_ranks)).partition("(")[0])  # Slurm: "4(x2)"
    if not 0 <= rank < n_ranks:
        raise RunError(f"{names[0]} {rank} is not below {names[1]} {n_ranks}")
    return Place(rank=rank, n_ranks=n_ranks, local_rank=local_rank, n_local=n_local)


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (torchrun, Slurm, ...) started this process as one of several."""
    environment = os.environ if environment is None else environment
    return "RANK" in environment or read_place(environment).n_ranks > 1


def n_restarts(environment: Mapping[str, str] | None = None) -> int:
    """How often the launcher started the ranks again."""
    environment = os.environ if environment is None else environment
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_name(environment: Mapping[str, str] | None = None) -> str:
    """What sets a launcher's job apart: its id, or else the process that started this one."""
    environment = os.environ if environment is None else environment
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{socket.gethostname()}:{os.getppid()}"


def is_watched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether polyreme's own launcher watches this rank."""
    return RECORD in (os.environ if environment is None else environment)
