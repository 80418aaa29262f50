"""torch.distributed.pipelining on the layers, stages and weights of a job of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from polyreme.graph.loss import cross_entropy
from polyreme.runtime.job import Job
from polyreme.runtime.mesh import World

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The peer's schedule over the stages of this rank, and its parameters by whole-model name."""

    schedule: Any
    modules: nn.ModuleList
    parameters: dict[str, nn.Parameter]
    reads: bool  # the first stage is here
    scores: bool  # the last stage is here

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Gradients of the mean loss over a batch; the loss, where the last stage is."""
        losses: list[torch.Tensor] = []
        weight = (labels != -100).sum()
        self.schedule.step(
            *([ids] if self.reads else []),
            target=labels if self.scores else None,
            losses=losses,
            loss_kwargs={"weight": weight},
            return_outputs=False,
        )
        return torch.stack(losses).sum() if self.scores else None


def peer(job: Job, world: World, name: str) -> Peer:
    """The schedule of that name on the stages that the plan of the job lays on this rank."""
    graph, plan = job.graph, job.plan
    here = [at for at, stage in enumerate(plan.stages) if stage.placements == ((world.rank,),)]
    modules, parameters = nn.ModuleList(), {}
    for at in here:
        layers = []
        for layer in plan.stages[at].layers:
            module = graph.build(layer).to_empty(device=world.device)
            graph.initialise(layer, module, job.train.seed)
            layers.append(module.to(_DTYPES[plan.precision]))
            names = graph.layer(layer).params
            parameters |= {names[own]: each for own, each in module.named_parameters()}
        modules.append(nn.Sequential(*layers))
    stages = [
        PipelineStage(module, at, len(plan.stages), world.device)
        for at, module in zip(here, modules, strict=True)
    ]
    single = issubclass(SCHEDULES[name], PipelineScheduleSingle)
    schedule = SCHEDULES[name](
        stages[0] if single else stages, plan.microbatches, loss_fn=_loss, scale_grads=False
    )
    return Peer(
        schedule=schedule,
        modules=modules,
        parameters=parameters,
        reads=here[0] == 0,
        scores=here[-1] == len(plan.stages) - 1,
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels)[0] / weight
