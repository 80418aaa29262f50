"""What every feedback promises, with every compressor."""

from __future__ import annotations

import copy
import io
import typing

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Compressor, TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.feedback import DGC, GMC, Feedback, OneBitAdam, WorkerMomentum
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.rule import SGD
from workers import play

torch.set_num_threads(1)

FEEDBACKS = [kind(warmup=2) if kind is OneBitAdam else kind() for kind in typing.get_args(Feedback)]
COMPRESSORS = [
    kind(ratio=0.2) if "ratio" in kind.__struct_fields__ else kind()
    for kind in typing.get_args(Compressor)
]
SHAPES = {"weight": (6, 3, 3), "bias": (7,), "empty": (0,), "one": ()}
N_ENTRIES = 62


def _name(member: object) -> str:
    return type(member).__name__


feedbacks = pytest.mark.parametrize("feedback", FEEDBACKS, ids=_name)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, N_ENTRIES, dtype=dtype)


def _algorithm(feedback, compress, **rule: float) -> DataParallel:
    return DataParallel(rule=SGD(**rule), compress=compress, feedback=feedback)


@pytest.mark.slice(15)
@feedbacks
@pytest.mark.parametrize("compress", COMPRESSORS, ids=_name)
def test_all_workers_stay_one_model_and_on_course(feedback, compress) -> None:
    for dtype in (torch.float32, torch.float64):
        algorithm = _algorithm(feedback, compress)
        played = play(algorithm, _gradient, _start(dtype), 3, 4, lr=0.01, shapes=SHAPES)
        params = played.params
        assert params.dtype == dtype
        assert torch.isfinite(params).all()
        assert (params == params[:, :1]).all()
        for state in played.states[-1]:
            kept = state["exchange"]["feedback"]
            assert all(kept[name].dtype == dtype for name in feedback.vectors)


@feedbacks
def test_state_is_zero_at_first_and_holds_what_it_says(feedback) -> None:
    params = torch.ones(5, dtype=torch.float64)
    state = feedback.init(params)
    tensors = {name for name, value in state.items() if torch.is_tensor(value)}
    assert tensors == set(feedback.vectors)
    for name in feedback.vectors:
        assert torch.equal(state[name], torch.zeros_like(params))
    assert all(isinstance(state[name], int | float) for name in set(state) - tensors)


@feedbacks
@pytest.mark.parametrize("compress", [Dense(), TopK(ratio=0.2)], ids=_name)
def test_a_run_that_is_saved_and_loaded_goes_on_bit_by_bit(feedback, compress) -> None:
    algorithm = _algorithm(feedback, compress)

    def on(rounds: int, states=None):
        return play(algorithm, _gradient, _start(), 3, rounds, lr=0.01, states=states).states[-1]

    saved = io.BytesIO()
    torch.save(on(3), saved)
    saved.seek(0)
    whole, halves = on(6), on(3, torch.load(saved, weights_only=True))
    for one, other in zip(whole, halves, strict=True):
        assert torch.equal(one["params"], other["params"])
        _same(one["exchange"], other["exchange"])


def _same(one, other) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            _same(value, other[name])
        elif torch.is_tensor(value):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@feedbacks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_arguments_stay_as_they_are_and_types_too(feedback, dtype: torch.dtype) -> None:
    gradient = torch.linspace(-1, 2, 7).to(dtype)
    state = feedback.init(gradient)
    for step in range(4):
        turn = Turn(step=step, lr=0.1)
        given, before = gradient.clone(), copy.deepcopy(state)
        prepared, after = feedback.prepare(gradient, state, turn)
        assert torch.equal(gradient, given)
        _same(state, before)
        sent = torch.where(prepared.abs() >= 1, prepared, torch.zeros_like(prepared))
        given, state, before = (prepared.clone(), sent.clone()), after, copy.deepcopy(after)
        after = feedback.settle(prepared, sent, sent != 0, state)
        assert torch.equal(prepared, given[0])
        assert torch.equal(sent, given[1])
        _same(state, before)
        given, state, before = sent.clone(), after, copy.deepcopy(after)
        out, after = feedback.receive(sent, state, turn)
        assert torch.equal(sent, given)
        _same(state, before)
        assert feedback.at(gradient, after).dtype == out.dtype == prepared.dtype == dtype
        assert all(after[name].dtype == dtype for name in feedback.vectors)
        state = after


@feedbacks
def test_zero_gradients_move_nothing(feedback) -> None:
    algorithm = _algorithm(feedback, TopK(ratio=0.2))
    played = play(algorithm, lambda _rank, _batch, w: torch.zeros_like(w), _start(), 2, 4)
    assert (played.params == _start()).all()
    for state in played.states[-1]:
        assert not any(state["exchange"]["feedback"][name].any() for name in feedback.vectors)


@feedbacks
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_worker_s_bad_gradient_reaches_no_memory(feedback, bad: float) -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        if batch == 2 and rank == 1:
            g[3] = bad
        return g

    algorithm = _algorithm(feedback, TopK(ratio=0.2))
    states = play(algorithm, gradient, _start(), 3, 4, lr=0.01).states
    for before, after in zip(states[2], states[3], strict=True):
        assert torch.equal(before["params"], after["params"])
        _same(before["exchange"], after["exchange"])
    assert all(torch.isfinite(state["params"]).all() for state in states[4])


@feedbacks
@pytest.mark.parametrize("n_entries", [0, 1])
def test_vectors_of_no_and_of_one_entry_are_trained(feedback, n_entries: int) -> None:
    algorithm, start = _algorithm(feedback, TopK(ratio=0.2)), torch.ones(n_entries).double()
    params = play(algorithm, _gradient, start, 2, 4, lr=0.01).params
    assert params.shape == (5, 2, n_entries)
    assert torch.isfinite(params).all()


@pytest.mark.parametrize(
    "feedback", [each for each in FEEDBACKS if not each.owns_momentum], ids=_name
)
def test_where_all_is_sent_there_is_nothing_to_feed_back(feedback) -> None:
    ours, plain = _algorithm(feedback, Dense()), _algorithm(FEEDBACKS[0], Dense())
    ends = [play(a, _gradient, _start(), 3, 6, lr=0.05).params for a in (ours, plain)]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "feedback", [GMC(), DGC(), DGC(masking=False), WorkerMomentum(dampened=False)], ids=_name
)
def test_where_all_is_sent_momentum_is_that_of_sgd(feedback) -> None:
    ours, theirs = _algorithm(feedback, Dense()), _algorithm(FEEDBACKS[0], Dense(), momentum=0.9)
    ends = [play(a, _gradient, _start(), 3, 6, lr=0.05).params for a in (ours, theirs)]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_nesterov_of_the_workers_own_is_that_of_sgd_if_all_is_sent() -> None:
    ours = _algorithm(DGC(nesterov=True), Dense())
    theirs = DataParallel(rule=SGD(momentum=0.9, nesterov=True))
    ends = [play(a, _gradient, _start(), 3, 6, lr=0.05).params for a in (ours, theirs)]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
