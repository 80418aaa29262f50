"""Whether a model and its data go together, as far as their options tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from ..algo.compose import DataParallel
from ..data.options import Data
from ..errors import Violation, literal, nearest_first
from ..graph.options import TASKS, Folder, Linear
from ..sample import Form, Objective
from .forms import example
from .options import Spec

_LEARNS: Mapping[Objective, str] = {
    "next": "predicts each token from those before it",
    "masked": "fills in masked tokens from all around them",
    "continuation": "reads a text with an encoder and writes on with a decoder",
}


def matched(spec: Spec) -> Spec:
    """The spec with what was left to the model: sparse features, a penalty, what text is for."""
    model = spec.model
    if model.trains_by_program and hasattr(spec.data, "sparse"):
        data = msgspec.structs.replace(spec.data, sparse=True)
        spec = msgspec.structs.replace(spec, data=data)
    if isinstance(model, Linear):
        algorithm = with_penalty(spec.data_parallel, model)
        return msgspec.structs.replace(spec, data_parallel=algorithm)
    if spec.data.gives.form != "text":
        return spec
    data = msgspec.structs.replace(spec.data, objective=_objective(spec))
    return msgspec.structs.replace(spec, data=data)


def with_penalty(algorithm: DataParallel, model: Linear) -> DataParallel:
    """The algorithm whose rule has the model's penalty, where it has none of its own."""
    rule = algorithm.rule.of_penalty(model.l1, model.group_l1, model.group_size)
    return msgspec.structs.replace(algorithm, rule=rule)


def form(spec: Spec) -> Iterator[Violation]:
    """The data must be of a form that the model reads."""
    reads, gives = spec.model.reads, spec.data.gives
    if not reads.forms or gives.form is None or gives.form in reads.forms:
        return
    wanted = " or ".join(reads.forms)
    kinds = [_tag(kind) for kind in get_args(Data) if {*kind.forms} & {*reads.forms}]
    if kinds:
        rule = f"gives {gives.form}, and the model reads {wanted}"
        legal = ", ".join(map(literal, kinds))
        yield _violation("data.kind", _tag(spec.data.__class__), rule, legal)
        return
    rule = f"reads {wanted}, and no kind of data gives that"
    if isinstance(spec.model, Folder):
        legal = '"models/mine" (any folder with a model that reads such data)'
        yield _violation("model.path", spec.model.path, rule, legal)
    else:
        yield from _unreadable(spec.model, gives.form, rule)


def suited(spec: Spec, violation: Violation) -> Iterator[Violation]:
    """A violation of which kind the data are, with kinds that the model reads as legal ones."""
    reads = spec.model.reads
    kinds = {_tag(each): each for each in get_args(Data) if {*each.forms} & {*reads.forms}}
    if not kinds:
        return
    if violation.path == "data":
        listed = [literal(example(types.type_info(kind))) for kind in kinds.values()]
    else:
        listed = [literal(each) for each in nearest_first(str(violation.value), list(kinds))]
    yield msgspec.structs.replace(violation, legal=", ".join(listed))


def objective(spec: Spec) -> Iterator[Violation]:
    """Text must be read for something that the model learns."""
    learnt, asked = spec.model.reads.objectives, spec.data.gives.objective
    if not learnt or asked is None or asked in learnt:
        return
    rule = f"does not suit the model, which {_LEARNS[learnt[0]]}"
    legal = ", ".join(map(literal, learnt))
    yield _violation("data.objective", asked, rule, f"{legal} (or leave it out)")


def classes(spec: Spec) -> Iterator[Violation]:
    """The model's vocabulary, or its number of classes, must hold the data's."""
    reads, gives = spec.model.reads, spec.data.gives
    held, needed = reads.n_classes, gives.classes_for(_objective(spec))
    if gives.form not in reads.forms or held is None or needed is None or held >= needed:
        return
    things = "different tokens" if gives.form == "text" else "classes"
    if gives.form == "text" and needed != gives.n_classes:
        things = "different tokens (the mask among them)"
    rule = f"is less than the {needed} {things} of the data"
    yield _of_configuration(spec, reads.classes_key, held, rule, needed, "or any integer >=")


def positions(spec: Spec) -> Iterator[Violation]:
    """A sample must not be longer than the model has learned positions."""
    reads, given = spec.model.reads, spec.train.seq_len
    held = reads.n_positions
    if held is None or held < 1 or given is None or given <= held:
        return
    rule = f"is more than the {held} positions of the model ({reads.positions_key})"
    legal = f"{held} (or any integer >= 1 and <= {held})"
    if not isinstance(spec.model, Folder):
        legal += f", or model.config.{reads.positions_key} = {given}"
    yield _violation("train.seq_len", given, rule, legal)


def pixels(spec: Spec) -> Iterator[Violation]:
    """Where a model fixes the form of its images, it must be the data's."""
    reads, gives = spec.model.reads, spec.data.gives
    if gives.size is not None:
        for held in (reads.height, reads.width):
            if held is not None and held != gives.size:
                rule = f"is not the {gives.size} pixels of the data's images"
                yield _of_configuration(spec, "image_size", held, rule, gives.size)
                break
    if None not in (gives.n_channels, reads.n_channels) and gives.n_channels != reads.n_channels:
        rule = f"is not the {gives.n_channels} channels of the data's images"
        yield _of_configuration(spec, "num_channels", reads.n_channels, rule, gives.n_channels)


def _objective(spec: Spec) -> Objective:
    """What text is read for: as the data say, else as the model learns."""
    given, learnt = spec.data.gives.objective, spec.model.reads.objectives
    return given or (learnt[0] if learnt else "next")


def _unreadable(model: Any, given: Form, rule: str) -> Iterator[Violation]:
    """A transformers model whose task no data are for: another task, or else another type."""

    def reading(model_type: str) -> list[str]:
        kind = model.__class__
        tasks = TASKS[model_type]
        return [t for t in tasks if given in kind(model_type=model_type, task=t).reads.forms]

    tasks = reading(model.model_type)
    if model.task is not None and tasks:
        yield _violation("model.task", model.task, rule, ", ".join(map(literal, tasks)))
    else:
        legal = ", ".join(literal(name) for name in TASKS if reading(name))
        yield _violation("model.model_type", model.model_type, rule, legal)


def _of_configuration(
    spec: Spec, key: str, held: object, rule: str, wanted: object, note: str = ""
) -> Violation:
    """A violation by a field of the configuration, which may be the spec's or a folder's."""
    if isinstance(spec.model, Folder):
        rule = f"has a config.json whose {key}, {held}, {rule}"
        legal = f'"models/mine" (any folder with a model whose {key} is {wanted})'
        return _violation("model.path", spec.model.path, rule, legal)
    legal = f"{wanted} ({note} {wanted})" if note else f"{wanted}"
    return _violation(f"model.config.{key}", held, rule, legal)


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def _violation(path: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=path, value=value, rule=rule, legal=legal)
