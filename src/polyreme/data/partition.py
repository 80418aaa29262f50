"""How samples are dealt to workers that own their data: the options of a spec."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class Iid(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="iid",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Equal shares of one shuffle. The plain string ``"iid"`` means the same."""


class Dirichlet(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="dirichlet",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Each class is dealt by shares drawn from Dirichlet(alpha); amounts differ.

    For samples that have a class. Source: Yurochkin et al. 2019, section 4.

    Attributes:
        alpha: The smaller, the fewer workers hold a class.
    """

    alpha: Annotated[float, msgspec.Meta(gt=0)]


class Classes(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="classes",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Samples sorted by class are cut into shards, of which each worker gets so many.

    For samples that have a class. A shard that lies over a border holds two classes.
    Source: McMahan et al. 2017, section 3.

    Attributes:
        per_worker: Shards of a worker: about how many classes it has.
    """

    per_worker: Annotated[int, msgspec.Meta(ge=1)] = 2


class Feature(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="by_feature",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Samples sorted by the value of a feature are cut into equal shares, one a worker.

    For samples of features: workers see different inputs, as where data were gathered in
    different places.

    Attributes:
        feature: Number of the feature, from 0.
    """

    feature: Annotated[int, msgspec.Meta(ge=0)] = 0


Partition = Iid | Dirichlet | Classes | Feature | Literal["iid"]
