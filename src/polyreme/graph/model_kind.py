"""What every model kind of a spec has."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from ..errors import Violation, undefined
from .reads import Reads

if TYPE_CHECKING:
    from ..sample import SampleSpec
    from .layer import LayerGraph


class ModelKind(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """What every model kind has; building one imports `imports`."""

    imports: ClassVar[tuple[str, ...]] = ()
    trains_by_program: ClassVar[bool] = False
    """Whether even plain training is by an algorithm's program: gradients are not by layers.

    Such a model sees all samples of a sum; it is whole on each worker, and solved in float64.
    """

    def check(self) -> list[Violation]:
        """What can be known to be wrong without torch or data; empty when nothing is."""
        return []

    @property
    def reads(self) -> Reads:
        """What the model asks of its data, as far as that is known without torch or data."""
        return Reads()

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """The model as layers, for samples of this form. Raises ConfigError where they differ."""
        raise undefined(self, "graph")
