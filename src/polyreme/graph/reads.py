"""What a model asks of its data, as far as its options tell. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..sample import Form, Objective

Task = Literal[
    "causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification", "image_classification"
]
_FORMS: Mapping[str, Form] = {
    "causal_lm": "text",
    "masked_lm": "text",
    "seq2seq_lm": "text",
    "sequence_classification": "texts with classes",
    "image_classification": "images",
}
_OBJECTIVES: Mapping[str, Objective] = {
    "causal_lm": "next",
    "masked_lm": "masked",
    "seq2seq_lm": "continuation",
}
SUFFIXES: Mapping[Task, str] = {
    "causal_lm": "ForCausalLM",
    "masked_lm": "ForMaskedLM",
    "seq2seq_lm": "ForConditionalGeneration",
    "sequence_classification": "ForSequenceClassification",
    "image_classification": "ForImageClassification",
}
# Families with learned positions: the names of their number, and transformers' default.
_POSITIONS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "gpt2": (("n_positions", "max_position_embeddings"), 1024),
    "bert": (("max_position_embeddings",), 512),
}


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """What samples a model can read; None where that is the data's affair, or not known.

    `forms` is empty where any may do; `objectives` are what the model can learn from text, the
    usual one first, empty where any may do. `n_classes` is the vocabulary of a language model,
    `classes_key` the field of a configuration that holds it, likewise `positions_key`. `height`
    and `width` are an image's.
    """

    forms: tuple[Form, ...] = ()
    objectives: tuple[Objective, ...] = ()
    n_classes: int | None = None
    classes_key: str = ""
    n_positions: int | None = None
    positions_key: str = ""
    n_channels: int | None = None
    height: int | None = None
    width: int | None = None


def of_configuration(model_type: str, task: Task, fields: Mapping[str, Any]) -> Reads:
    """What a transformers model of this type, task and fields reads."""
    form = _FORMS[task]
    if form == "images":
        size = fields.get("image_size")
        sizes = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        height, width = map(_count, sizes)
        return Reads(
            forms=(form,),
            n_classes=_labels(fields),
            classes_key="num_labels",
            n_channels=_count(fields.get("num_channels")),
            height=height,
            width=width,
        )
    words = form != "texts with classes"
    names, default = _POSITIONS.get(model_type, ((), None))
    given = [name for name in names if name in fields]
    return Reads(
        forms=(form,),
        objectives=(_OBJECTIVES[task],) if words else (),
        n_classes=_count(fields.get("vocab_size")) if words else _labels(fields),
        classes_key="vocab_size" if words else "num_labels",
        n_positions=_count(fields[given[0]]) if given else default,
        positions_key=(given or names or ("",))[0],
    )


def task_of(tasks: Sequence[Task], architectures: Sequence[str]) -> Task:
    """Which of a family's tasks the architectures (names of classes) are for, else its first."""
    for architecture in architectures:
        for task in tasks:
            if architecture.endswith(SUFFIXES[task]):
                return task
    return tasks[0]


def _labels(fields: Mapping[str, Any]) -> int | None:
    named = fields.get("id2label")
    return len(named) if isinstance(named, Mapping) else _count(fields.get("num_labels"))


def _count(value: object) -> int | None:
    """A number that counts something; None for whatever is none (transformers says so later)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
