"""Served syncs whose workers have models of their own, and the one of shared memory."""

from __future__ import annotations

import random

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.feedback import ErrorFeedback, WorkerMomentum
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import (
    ASGD,
    EASGD,
    AsyncADMM,
    Downpour,
    EveryStep,
    Hogwild,
    LocalSteps,
)
from polyreme.sim.compute import Constant, LogNormal
from served import Post, simulated
from workers import play

torch.set_num_threads(1)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _order(seed: int, n: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(n) for _ in range(length)]


# Downpour -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("push_every", "fetch_every"), [(1, 1), (1, 4), (3, 3), (2, 6)])
def test_one_worker_of_downpour_is_plain_training(push_every: int, fetch_every: int) -> None:
    """Its own parameters and the server's are the same all the way."""
    rule = SGD(weight_decay=0.01)
    sync = Downpour(push_every=push_every, fetch_every=fetch_every)
    post, n = Post(_of(sync, rule=rule), _gradient, _start(), 1), 12 // push_every
    post.order([0] * n)
    theirs = play(_of(EveryStep(), rule=rule), _gradient, _start(), 1, 12).params[-1, 0]
    _close(post.params, theirs)


def test_downpour_does_as_its_algorithm() -> None:
    """Each worker and the server written out, in a random order of pushes."""
    n, lr, drawn = 3, 0.02, random.Random(4)
    sync = Downpour(push_every=2, fetch_every=6)
    post = Post(_of(sync, rule=SGD(momentum=0.5)), _gradient, _start(), n, lr=lr)
    centre, momentum = _start(), torch.zeros(12).double()
    own, clocks = [_start() for _ in range(n)], [0] * n
    for _ in range(80):
        worker, total = drawn.randrange(n), 0
        for _ in range(2):
            found = _gradient(worker, clocks[worker], own[worker])
            own[worker], total = own[worker] - lr * found, total + found
            clocks[worker] += 1
        momentum = 0.5 * momentum + total
        centre = centre - lr * momentum
        if clocks[worker] % 6 == 0:
            own[worker] = centre
        post.arrive(worker)
        _close(post.params, centre)


def test_pushes_without_a_fetch_are_not_answered() -> None:
    """Nor waited for: servers send one vector for three."""
    post = Post(_of(Downpour(push_every=1, fetch_every=3)), _gradient, _start(), 2)
    post.order([0] * 6 + [1] * 3)
    heading = 8
    assert post.nbytes[2] == 3 * (12 * 8 + heading)
    clock = simulated(
        _of(Downpour(push_every=1, fetch_every=3)), _gradient, _start(), 2, compute=Constant()
    )
    clock.play(30)
    assert clock.sent_bytes[2] <= clock.received_bytes[2] / 3


@pytest.mark.parametrize("compress", [TopK(ratio=0.25), QSGD()])
def test_gathered_gradients_may_be_compressed(compress) -> None:
    order = _order(7, 3, 300)
    sync = Downpour(push_every=2, fetch_every=4)
    dense = Post(_of(sync), _gradient, _start(), 3, lr=0.01).order(order)
    more = {"compress": compress, "feedback": ErrorFeedback()}
    packed = Post(_of(sync, **more), _gradient, _start(), 3, lr=0.01).order(order)
    assert (packed.params - dense.params).norm() < 0.2 * (dense.params - _start()).norm()
    assert sum(packed.nbytes[:3]) < sum(dense.nbytes[:3])


def test_steps_of_a_push_that_is_not_finite_are_dropped_with_it() -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return _gradient(rank, batch, w) * (float("nan") if batch == 3 else 1.0)

    sync = Downpour(push_every=2, fetch_every=8)
    post = Post(_of(sync), gradient, _start(), 1)
    before = post.states[0]["params"]
    post.arrive(0)  # then it computes batches 2 and 3
    assert torch.equal(post.states[0]["params"], before)
    post.arrive(0)
    _close(post.params, before)


def test_fetches_follow_pushes() -> None:
    (found,) = _of(Downpour(push_every=4, fetch_every=6)).check()
    assert (found.path, found.value) == ("data_parallel.sync.fetch_every", 6)
    assert found.legal == "a multiple of data_parallel.sync.push_every (4)"


# EASGD --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 5])
@pytest.mark.parametrize(("n", "local_steps"), [(1, 1), (1, 4), (3, 1), (4, 3)])
def test_easgd_does_as_its_algorithm(servers: int, n: int, local_steps: int) -> None:
    """Algorithm 1 of Zhang et al. 2015, with clocks from 1, in a random order of workers."""
    lr, alpha = 0.05, 0.2
    sync = EASGD(alpha=alpha, local_steps=local_steps, servers=servers)
    post = Post(_of(sync), _gradient, _start(), n, lr=lr)
    centre, own, clocks = _start(), [_start() for _ in range(n)], [0] * n
    for worker in _order(3, n, 60):
        for _ in range(local_steps):
            x = own[worker]
            own[worker] = x - lr * _gradient(worker, clocks[worker], x)
            clocks[worker] += 1
            if clocks[worker] % local_steps == 0:
                own[worker] = own[worker] - alpha * (x - centre)
                centre = centre + alpha * (x - centre)
        post.arrive(worker)
        _close(post.params, centre)


def test_one_worker_of_easgd_is_synchronous_easgd() -> None:
    """Equations 3 and 4: model and centre move at once, by the difference that they had."""
    lr, alpha = 0.05, 0.9
    post = Post(_of(EASGD(local_steps=1)), _gradient, _start(), 1, lr=lr)
    x, centre = _start(), _start()
    for at in range(20):
        found = _gradient(0, at, x)
        x, centre = x - lr * found - alpha * (x - centre), centre + alpha * (x - centre)
        post.arrive(0)
        _close(post.params, centre)


def test_momentum_of_a_worker_is_torchs_between_pulls() -> None:
    """EAMSGD: without a pull a worker does as torch's Nesterov."""
    rule, alpha = SGD(momentum=0.9, nesterov=True), 1e-12
    post = Post(_of(EASGD(alpha=alpha, local_steps=8), rule=rule), _gradient, _start(), 1)
    w = torch.nn.Parameter(_start())
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True)
    for at in range(8):
        w.grad = _gradient(0, at, w.detach())
        optimizer.step()
    _close(post.states[0]["params"], w.detach())


def test_what_a_worker_loses_the_centre_gains() -> None:
    post, seen = Post(_of(EASGD(local_steps=2)), _gradient, _start(), 3), []
    post.gradient = lambda rank, batch, w: (seen.append(w), _gradient(rank, batch, w))[1]
    for worker in _order(5, 3, 30):
        before, centre = post.states[worker]["params"], post.params
        seen.clear()
        post.arrive(worker)  # the first gradient of its next steps is where the pull left it
        _close(seen[0] + post.params, before + centre)
    assert (post.params - _start()).norm() > 1


def test_one_that_comes_begins_at_the_centre() -> None:
    post = Post(_of(EASGD(local_steps=2, servers=3)), _gradient, _start(), 3)
    post.order(_order(5, 3, 30))
    post.leave(1)
    post.order([0, 2, 0])
    centre, batch = post.params, post.states[1]["step"]
    seen: list[torch.Tensor] = []
    post.gradient = lambda rank, batch, w: (seen.append(w), _gradient(rank, batch, w))[1]
    post.come(1)
    assert not seen  # it asks first
    post.arrive(1)
    assert torch.equal(post.params, centre)
    assert torch.equal(seen[0], centre)
    assert post.states[1]["step"] == batch + 2


def test_models_are_not_pulled_by_a_push_that_is_not_finite() -> None:
    """Nor do they take the step; the other steps of their own stand."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return _gradient(rank, batch, w) * (float("nan") if (rank, batch) == (0, 3) else 1.0)

    post, alpha = Post(_of(EASGD(alpha=0.3, local_steps=2)), gradient, _start(), 2), 0.3
    x, x_before = _start(), _start()
    for batch in range(2):
        x, x_before = x - 0.1 * _gradient(0, batch, x), x
    pull = alpha * (x_before - _start())
    post.arrive(0)
    x = x - pull
    x = x - 0.1 * _gradient(0, 2, x)
    _close(post.states[0]["params"], x)
    centre = post.params
    post.arrive(0)
    assert torch.equal(post.params, centre)
    for batch in (4, 5):
        x = x - 0.1 * _gradient(0, batch, x)
    _close(post.states[0]["params"], x)


# Asynchronous ADMM --------------------------------------------------------------------------------


def _problem(n: int, d: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Least squares of n workers, and the solution of all of them together."""
    drawn = torch.Generator().manual_seed(5)
    a = [torch.randn(6, d, generator=drawn, dtype=torch.float64) for _ in range(n)]
    b = [torch.randn(6, generator=drawn, dtype=torch.float64) for _ in range(n)]
    return a, b, torch.linalg.lstsq(torch.cat(a), torch.cat(b)).solution


def _squares(a: list[torch.Tensor], b: list[torch.Tensor]):
    return lambda rank, _batch, w: a[rank].T @ (a[rank] @ w - b[rank]) / 6


@pytest.mark.slice(1)
@pytest.mark.parametrize(("barrier", "delay"), [(1, 4), (2, 8), (4, 1)])
def test_admm_solves_least_squares_of_all_workers(barrier: int, delay: int) -> None:
    n, drawn = 4, random.Random(1)
    a, b, solution = _problem(n)
    sync = AsyncADMM(rho=1.0, barrier=barrier, delay=delay, local_steps=60)
    post = Post(_of(sync), _squares(a, b), torch.zeros(4).double(), n, lr=0.2)
    for _ in range(160 * n):
        post.arrive(drawn.choice(post.can()))
    _close(post.params, solution, atol=1e-6)


@pytest.mark.parametrize(("n", "barrier", "delay"), [(4, 4, 8), (4, 1, 1), (1, 1, 8)])
def test_admm_that_waits_for_all_is_synchronous(n: int, barrier: int, delay: int) -> None:
    """Boyd et al. 2011, section 7.1, with local problems solved in closed form."""
    rho, drawn = 0.7, random.Random(2)
    a, b, _ = _problem(n)
    sync = AsyncADMM(rho=rho, barrier=barrier, delay=delay, local_steps=400)
    post = Post(_of(sync), _squares(a, b), torch.zeros(4).double(), n, lr=0.25)
    z, duals = torch.zeros(4).double(), [torch.zeros(4).double() for _ in range(n)]
    for _ in range(6):
        models = [
            torch.linalg.solve(
                a[i].T @ a[i] / 6 + rho * torch.eye(4).double(),
                a[i].T @ b[i] / 6 - duals[i] + rho * z,
            )
            for i in range(n)
        ]
        z = sum(x + y / rho for x, y in zip(models, duals, strict=True)) / n
        duals = [y + rho * (x - z) for x, y in zip(models, duals, strict=True)]
        post.order(drawn.sample(range(n), n))
        _close(post.params, z, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_no_worker_is_left_out_of_as_many_consensuses_as_delay_says(seed: int) -> None:
    drawn = random.Random(seed)
    n = drawn.randint(2, 5)
    barrier, delay = drawn.randint(1, n), drawn.randint(1, 4)
    sync = AsyncADMM(barrier=barrier, delay=delay, local_steps=1)
    post = Post(_of(sync), _gradient, _start(), n, lr=0.01)
    since, came, n_made = [0] * n, set(), 0
    for _ in range(80):
        worker = drawn.choice(post.can())
        came.add(worker)
        before = post.params
        post.arrive(worker)
        if torch.equal(post.params, before):
            continue
        assert len(came) >= barrier
        since = [0 if rank in came else each + 1 for rank, each in enumerate(since)]
        assert max(since) < delay
        came, n_made = set(), n_made + 1
    assert n_made >= 80 // (n + 1)


@pytest.mark.parametrize("sync", [EASGD(), AsyncADMM(), Hogwild()])
def test_what_is_no_gradient_is_not_compressed(sync) -> None:
    name = type(sync).__name__
    (found,) = _of(sync, compress=TopK(ratio=0.1)).check()
    assert (found.path, found.value) == ("data_parallel.compress.kind", "TopK")
    assert (name in found.rule, found.legal) == (True, '"Dense"')
    (found,) = _of(sync, feedback=WorkerMomentum()).check()
    assert (found.path, found.legal) == ("data_parallel.feedback.kind", '"None"')


# Hogwild ------------------------------------------------------------------------------------------


def test_hogwild_moves_no_bytes_and_takes_no_time_but_for_gradients() -> None:
    def played(sync):
        clock = simulated(_of(sync, rule=AdamW()), _gradient, _start(), 4, compute=Constant())
        clock.play(10)
        return clock

    ours, theirs = played(Hogwild()), played(ASGD())
    assert (sum(ours.sent_bytes), sum(ours.received_bytes)) == (0, 0)
    assert ours.clock.now_s == pytest.approx(10 * Constant().seconds, abs=1e-12)
    assert theirs.clock.now_s > ours.clock.now_s
    assert sum(theirs.sent_bytes) > 0


def test_hogwild_is_asynchronous_in_the_order_of_the_clock() -> None:
    came: list[tuple[int, int]] = []
    clock = simulated(
        _of(Hogwild()),
        _gradient,
        _start(),
        4,
        compute=LogNormal(spread=1.0),
        on_record=lambda _me, record, _s: came.append((record.seen.workers[0], record.delays[0])),
    )
    clock.play(12)
    again = Post(_of(ASGD()), _gradient, _start(), 4).order([worker for worker, _ in came])
    assert torch.equal(again.params, clock.algorithm.sync.whole(clock.states[4:]))
    assert [record.delays[0] for record in again.records] == [delay for _, delay in came]
    assert max(delay for _, delay in came) > 3


# One worker of each -------------------------------------------------------------------------------


def test_one_worker_of_admm_with_a_weak_tie_is_local_steps() -> None:
    """The consensus of one is its own model and dual, which a tie of nothing leaves at zero."""
    rho = 1e-13
    sync = AsyncADMM(rho=rho, local_steps=5)
    post = Post(_of(sync), _gradient, _start(), 1)
    model = _start()
    theirs = play(_of(LocalSteps(every=5)), _gradient, _start(), 1, 3).params
    for at in range(3):
        model = post.states[0]["model"]
        _close(model, theirs[at + 1, 0], atol=1e-10)
        post.arrive(0)
