"""How torch compiles a layer: the one place, for layers that train and for those measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMS = 64  # of one forward function: kinds of layers, sizes of microbatches, training or not


class Score(Protocol):
    """The summed loss of logits by labels, and how many labels carry it."""

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `graph.loss.cross_entropy`."""


def compile_layer(module: nn.Module) -> None:
    """Have a layer compiled at its first call, for exactly the sizes that it gets.

    A microbatch of another size is compiled anew. Layers of one class share what is compiled of
    them; where they have more forms than torch expects of a function, it would run the rest as
    they are, without an error. Modules in it whose `compiles` is false are called as they are.
    """
    import torch

    _allow_forms()
    apart: Any = torch.compiler.disable
    for each in module.modules():
        if not getattr(each, "compiles", True):
            each.forward = apart(each.forward)
    module.compile(dynamic=False)


def compile_loss(score: Score) -> Score:
    """Have the summed loss of logits compiled: they are not copied to float32, nor kept twice."""
    import torch

    _allow_forms()
    compiled: Score = torch.compile(score, dynamic=False)
    return compiled


def _allow_forms() -> None:
    import torch._dynamo

    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)


def forget_compiled() -> None:
    """Drop all that this process has compiled: what is measured next finds nothing of it."""
    import torch

    torch.compiler.reset()
