"""How torch compiles a layer: the one place, for layers that train and for those measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

FORMS = 64  # of one forward function: kinds of layers, sizes of microbatches, training or not


def compile_layer(module: nn.Module) -> None:
    """Have a layer compiled at its first call, for exactly the sizes that it gets.

    A microbatch of another size is compiled anew. Layers of one class share what is compiled of
    them; where they have more forms than torch expects of a function, it would run the rest as
    they are, without an error.
    """
    import torch._dynamo

    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)
    module.compile(dynamic=False)


def forget_compiled() -> None:
    """Drop all that this process has compiled: what is measured next finds nothing of it."""
    import torch

    torch.compiler.reset()
