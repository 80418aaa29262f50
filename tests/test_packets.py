"""A function of all workers' messages is called once for the same packets, and never stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from polyreme.algo.aggregate.kind import AggregatorKind
from polyreme.algo.compose import DataParallel
from polyreme.algo.exchange import dense
from polyreme.algo.packet import Message, applied
from polyreme.algo.rule import SGD
from polyreme.algo.topology import AllReduce, ParameterServer, Ring
from workers import play

torch.set_num_threads(1)


class Decaying(AggregatorKind, frozen=True, kw_only=True, tag="Decaying", tag_field="kind"):
    """A running mean of means, as an aggregator with a state."""

    keep: float = 0.5

    def init(self, like: torch.Tensor) -> dict[str, Any]:
        return {"mean": torch.zeros_like(like)}

    def combine(self, rows, state):
        mean = self.keep * state["mean"] + (1 - self.keep) * torch.stack(list(rows)).mean(0)
        return mean, {"mean": mean}, ()


class Scaled:
    """What gives a bound method, of which all have one code."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def first(self, messages: Sequence[Message]) -> float:
        return self.factor * float(messages[0].packets[0].decode()[0])


def _messages() -> list[Message]:
    return [dense([torch.tensor([float(i + 1)]), torch.zeros(2)]) for i in range(3)]


def _scaling(factor: Any) -> Callable[[Sequence[Message]], float]:
    return lambda messages: float(factor) * float(messages[0].packets[0].decode()[0])


def _nested(state: dict[str, Any]) -> Callable[[Sequence[Message]], float]:
    return lambda messages: float(state["mean"]["w"].sum()) + len(messages)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_scaling(2.0), _scaling(3.0)),
        (_scaling(torch.tensor(2.0)), _scaling(torch.tensor(3.0))),
        (_nested({"mean": {"w": torch.zeros(2)}}), _nested({"mean": {"w": torch.ones(2)}})),
        (Scaled(2.0).first, Scaled(3.0).first),
    ],
    ids=["numbers", "tensors", "states", "methods"],
)
def test_what_another_closure_gave_of_the_same_packets_is_not_taken(one, other) -> None:
    messages = _messages()
    assert applied(one, messages) == one(_messages())
    assert applied(other, messages) == other(_messages())
    assert applied(one, messages) == one(_messages())


def test_what_a_default_changes_is_not_taken() -> None:
    messages = _messages()
    functions = [lambda _messages, factor=factor: factor for factor in (2, 3)]
    assert [applied(each, messages) for each in functions] == [2, 3]


def test_packets_of_other_messages_are_other_messages() -> None:
    a, b, c, d = (packet for message in _messages()[:2] for packet in message.packets)

    def sizes(messages: Sequence[Message]) -> list[int]:
        return [len(message.packets) for message in messages]

    for split in (1, 2, 3):
        packets = (a, b, c, d)
        messages = [Message(packets=packets[:split]), Message(packets=packets[split:])]
        assert applied(sizes, messages) == [split, 4 - split]


def test_equal_functions_of_the_same_packets_are_called_once() -> None:
    messages, calls = _messages(), []

    def made(state: dict[str, Any]) -> Callable[[Sequence[Message]], int]:
        def function(messages: Sequence[Message]) -> int:
            calls.append(1)
            return len(messages) + len(state)

        return function

    states = [{"mean": torch.ones(2), "n": 1} for _ in range(4)]
    assert [applied(made(state), messages) for state in states] == [5] * 4
    assert len(calls) == 1
    assert applied(made(states[0]), _messages()) == 5
    assert len(calls) == 2


@pytest.mark.parametrize("topology", [AllReduce(), Ring(), ParameterServer()], ids=str)
def test_an_aggregator_with_state_has_its_own_at_every_step(topology) -> None:
    n, targets = 3, torch.arange(12.0, dtype=torch.float64).view(3, 4)
    algorithm = DataParallel(rule=SGD(), topology=topology, aggregate=Decaying())
    start = torch.zeros(4, dtype=torch.float64)
    played = play(algorithm, lambda rank, _batch, w: w - targets[rank], start, n, 6)
    w, mean = start, torch.zeros_like(start)
    for step in range(6):
        mean = 0.5 * mean + 0.5 * (w - targets.mean(0))
        w = w - 0.1 * mean
        for rank in range(n):
            torch.testing.assert_close(played.params[step + 1, rank], w, rtol=0, atol=1e-12)
