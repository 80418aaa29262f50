"""The aggregate of what all workers sent, wherever it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from . import stacked
from .aggregate.robust import Broken
from .attacking import Sight
from .compress.maybe import holds
from .effects import Program, Split, Suspect, settled

if TYPE_CHECKING:
    import torch

    from .aggregate.kind import AggregatorKind, Combined
    from .compose import DataParallel
    from .draw import Draw
    from .packet import Message
    from .worker import Worker

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Whose vectors an aggregate is made of.

    Workers whose message holds nothing are no rows if they are `absent`; a robust aggregate counts
    them as hostile, as far as there are fewer rows than `expected` (unset: of all workers).
    `weights` (one a worker) say how much the others count, where they do not count alike. `sight`
    has the attacks of those that see all rows, `step` is which of the run's it is, from 0.
    """

    absent: bool = False
    expected: int | None = None
    weights: tuple[float, ...] | None = None
    sight: Sight | None = None
    step: int | None = None


class Made:
    """The aggregate of messages, made once for all who share this: by whoever asks first.

    `state` has that of the aggregator, ``aggregate``, and of attacks on it, ``attack``.
    """

    def __init__(
        self, aggregate: AggregatorKind, messages: Sequence[Message], state: State, rows: Rows
    ) -> None:
        self._aggregate, self._state, self._which = aggregate, state, rows
        self._messages: Sequence[Message] = messages
        self._found: Combined | None = None

    def found(self) -> Split[Combined]:
        """The aggregate, the next state, and workers that are suspects."""
        if self._found is None:
            found = yield from self._make()
            self._messages, self._found = (), found
        return self._found

    def _make(self) -> Split[Combined]:
        import torch

        messages, which, aggregate = self._messages, self._which, self._aggregate
        there = [w for w, each in enumerate(messages) if not which.absent or holds(each)]
        there = there or list(range(len(messages)))
        rows = [
            torch.cat([x.reshape(-1) for x in stacked.decoded(messages[w].packets)]) for w in there
        ]
        if len(rows) < len(messages) and not aggregate.robust:  # scaled as for a mean over all
            rows = [row * (len(rows) / len(messages)) for row in rows]
        told: dict[str, Any] = {}
        if which.weights is not None and aggregate.takes_weights:
            told["weights"] = [which.weights[w] for w in there]
        expected = len(messages) if which.expected is None else which.expected
        absent = max(0, expected - len(rows))
        if aggregate.robust:
            told["absent"] = absent
        if aggregate.takes_numbers:
            told["numbers"] = there
        before, attack = self._state["aggregate"], self._state["attack"]

        def combined(rows: Sequence[torch.Tensor]) -> Split[Combined]:
            return (yield from settled(aggregate.combine(rows, before, **told)))

        if which.sight is not None:
            held = dict(zip(there, rows, strict=True))
            rows, attack = yield from which.sight.among(held, messages, attack, combined)
        silent = {w for w in range(len(messages)) if w not in there}
        if absent != len(silent):  # some were not asked
            silent = set()
        try:
            out, after, suspects = yield from combined(rows)
        except RunError as error:
            gone = {there[row] for row in error.rows} if isinstance(error, Broken) else set()
            raise self._broken(error, silent | gone) from None
        named = {there[row] for row in suspects}
        if aggregate.bears:
            named |= silent
        return out, {"aggregate": after, "attack": attack}, tuple(sorted(named))

    def _broken(self, error: RunError, gone: set[int]) -> RunError:
        """The same error with the step and the workers whose rows are gone."""
        step = "" if self._which.step is None else f"step {self._which.step + 1}: "
        who = ", ".join(map(str, sorted(gone)))
        named = f" (those of worker{'s' * (len(gone) > 1)} {who})" if gone else ""
        return RunError(f"{step}{error}{named}")


def aggregated(
    algorithm: DataParallel,
    message: Message,
    state: State,
    topology: State,
    me: Worker,
    draw: Draw | None,
    rows: Rows,
) -> Program[tuple[list[torch.Tensor], State, State]]:
    """Aggregates of a message's tensors over all workers; the next state, and the topology's.

    They are in their shapes, or vectors. `state` is as in `Made`.

    Where packets add and the aggregate is their mean, they may be summed on the way. `draw` is for
    packets of the way back, which without one are dense. Vectors were scaled as for a mean over
    all, unless the aggregate is robust; where some workers are absent that is taken back.
    """
    via, aggregate = algorithm.topology, algorithm.aggregate
    suspects: tuple[int, ...] = ()

    def function(messages: Sequence[Message]) -> Made:
        return Made(aggregate, messages, state, rows)

    def served(messages: Sequence[Message]) -> Split[tuple[torch.Tensor, State]]:
        nonlocal suspects
        out, after, suspects = yield from function(messages).found()
        return out, after

    adds = aggregate.is_mean and all(packet.kind.adds for packet in message.packets)
    adds = adds and rows.sight is None
    if adds and not (via.at_servers and draw is not None and via.compresses_back):
        total = yield from via.sum(message, me)
        return [packet.decode() / me.n for packet in total.packets], state, topology
    if via.at_servers:
        means, after, topology = yield from via.serve(message, served, topology, me, draw)
        if suspects:
            yield Suspect(workers=suspects)
        return means, state if after is None else after, topology
    made: Made = yield from via.combine(message, function, me)
    flat, after, suspects = yield from made.found()
    if suspects:
        yield Suspect(workers=suspects)
    sizes = [packet.like.n_entries for packet in message.packets]
    return list(flat.split(sizes)), after, topology  # type: ignore[no-untyped-call]
