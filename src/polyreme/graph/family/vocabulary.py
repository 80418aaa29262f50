"""Tables of embeddings and heads over a vocabulary, split over tensor parts by its rows."""

from __future__ import annotations

from ..tensor import Cutting, Read, Region, Run, TensorPlan


def table(path: str, n_rows: int, n_tokens: int, *, positions: tuple[str, ...] = ()) -> TensorPlan:
    """An embedding layer: each part looks up the rows it holds; `positions` are other tables."""
    rows = Run(what="vocab_size", units=n_rows)
    return TensorPlan(
        cuttings=(Cutting(path=path, side="vocabulary", runs=(rows,)),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
        positions=positions,
    )


def scores(path: str, n_classes: int, n_tokens: int) -> TensorPlan:
    """A head: each part scores the classes it holds, for all tokens."""
    rows = Run(what="vocab_size", units=n_classes)
    return TensorPlan(
        cuttings=(Cutting(path=path, side="vocabulary", runs=(rows,)),),
        regions=(Region(entry=path, exit=None, reads=(Read(n_tokens=n_tokens),)),),
        outputs={"logits": "vocabulary"},
        n_tokens=n_tokens,
    )
