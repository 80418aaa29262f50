"""Orders and partitions: which samples a step reads."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.data import deal, shuffle
from polyreme.data.options import Classes, Dirichlet, Iid
from polyreme.data.order import Order, Partitioned, arrange, microbatches, share
from polyreme.errors import ConfigError

TAILS = ["drop", "short", "wrap"]
GOLDEN_TEN = [0, 4, 8, 3, 9, 7, 5, 1, 6, 2]
GOLDEN_MANY = [24194666, 52117434, 6904631]
GOLDEN_DIRICHLET = [222, 354, 161, 263]


def _source(labels: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(n_train=len(labels), labels=lambda: labels)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_shuffle_names_each_sample_once(n: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert sorted(shuffle.at(np.arange(n), n, key)) == list(range(n))


def test_the_shuffle_is_the_same_for_ever() -> None:
    """A changed order would break every resumed run; these numbers must never change."""
    assert shuffle.at(np.arange(10), 10, shuffle.key(0, 0)).tolist() == GOLDEN_TEN
    assert shuffle.at(np.arange(3), 10**8, shuffle.key(7, 3)).tolist() == GOLDEN_MANY


def test_all_permutations_come_up_equally_often() -> None:
    n, draws = 4, 4800
    seen = dict.fromkeys(itertools.permutations(range(n)), 0)
    for draw in range(draws):
        seen[tuple(shuffle.at(np.arange(n), n, shuffle.key(1, draw)).tolist())] += 1
    expected = draws / len(seen)
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_a_place_in_a_huge_shuffle_needs_no_list_of_it() -> None:
    found = shuffle.at(np.array([0, 10**12 - 1]), 10**12, shuffle.key(3))
    assert len(set(found.tolist())) == 2
    assert all(0 <= number < 10**12 for number in found)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n_workers", [2, 3, 5, 8])
def test_replicas_do_not_change_what_a_step_reads(tail: str, n_workers: int) -> None:
    order = Order(n_samples=23, global_batch=7, seed=1, tail=tail)
    for step in range(10):
        parts = [order.local(step, worker, n_workers) for worker in range(n_workers)]
        assert np.concatenate(parts).tolist() == order.batch(step).tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_drop_reads_no_sample_twice_and_leaves_out_the_rest() -> None:
    order = Order(n_samples=10, global_batch=4, seed=0, tail="drop")
    assert order.steps_per_epoch == 2
    read = np.concatenate([order.batch(step) for step in range(2)])
    assert len(set(read.tolist())) == 8
    assert order.n_steps(3) == 6


def test_short_reads_each_sample_once_an_epoch() -> None:
    order = Order(n_samples=10, global_batch=4, seed=0, tail="short")
    for epoch in range(3):
        batches = [order.batch(3 * epoch + step) for step in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(np.concatenate(batches)) == list(range(10))


def test_wrap_fills_batches_and_loses_nothing_over_epochs() -> None:
    order = Order(n_samples=10, global_batch=4, seed=0, tail="wrap")
    assert order.n_steps(2) == 5
    read = np.concatenate([order.batch(step) for step in range(5)])
    assert sorted(read[:10]) == list(range(10))
    assert sorted(read[10:]) == list(range(10))
    assert [order.epoch(step) for step in range(5)] == [0, 0, 0, 1, 1]


def test_fewer_samples_than_a_batch() -> None:
    with pytest.raises(ConfigError, match="3 training samples"):
        Order(n_samples=3, global_batch=8, seed=0, tail="drop")
    assert len(Order(n_samples=3, global_batch=8, seed=0, tail="short").batch(5)) == 3
    wrapped = Order(n_samples=3, global_batch=8, seed=0, tail="wrap").batch(0)
    assert np.bincount(wrapped).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


@pytest.mark.parametrize("tail", TAILS)
def test_no_samples_at_all_is_refused(tail: str) -> None:
    with pytest.raises(ConfigError, match="no training samples"):
        Order(n_samples=0, global_batch=1, seed=0, tail=tail)


def test_epochs_and_seeds_differ_and_steps_do_not() -> None:
    def read(seed: int, epoch: int) -> list[int]:
        order = Order(n_samples=50, global_batch=50, seed=seed, tail="drop")
        return order.batch(epoch).tolist()

    assert read(0, 0) == read(0, 0)
    assert read(0, 0) != read(0, 1)
    assert read(0, 0) != read(1, 0)


def test_a_caller_that_changes_its_batch_changes_nothing_else() -> None:
    order = Order(n_samples=50, global_batch=8, seed=0, tail="drop")
    before = order.batch(0).tolist()
    order.batch(0)[:] = -1
    order.local(0, 0, 2)[:] = -1
    assert order.batch(0).tolist() == before


@given(n=st.integers(0, 40), parts=st.integers(1, 9))
def test_shares_are_the_whole_in_order(n: int, parts: int) -> None:
    whole = np.arange(n)
    cut = microbatches(whole, parts)
    assert np.concatenate(cut).tolist() == whole.tolist()
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert cut[0].tolist() == share(whole, 0, parts).tolist()


def test_a_batch_of_eight_in_three_microbatches() -> None:
    assert [len(part) for part in microbatches(np.arange(8), 3)] == [3, 3, 2]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    n_workers=st.integers(1, 7),
    seed=st.integers(0, 2**40),
)
def test_every_sample_has_one_owner(labels: list[int], n_workers: int, seed: int) -> None:
    classes = np.array(labels)
    for parts in (
        deal.iid(len(labels), n_workers, seed),
        deal.dirichlet(classes, n_workers, 0.05, seed),
        deal.dirichlet(classes, n_workers, 50.0, seed),
        deal.classes(classes, n_workers, 2, seed),
    ):
        assert len(parts) == n_workers
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("partition", ["iid", Iid(), Dirichlet(alpha=1.0), Classes(per_worker=3)])
def test_a_worker_reads_all_that_it_owns_and_no_more(partition: object) -> None:
    order = arrange(
        _source(np.arange(60) % 6), partition, n_workers=3, global_batch=7, seed=5, tail="short"
    )
    owned = [{int(i) for step in range(60) for i in order.local(step, w, 3)} for w in range(3)]
    assert sum(map(len, owned)) == 60
    assert set.union(*owned) == set(range(60))


def test_dirichlet_is_the_same_for_ever_and_alpha_matters() -> None:
    labels = np.arange(1000) % 10

    def counts(alpha: float) -> np.ndarray:
        order = arrange(
            _source(labels),
            Dirichlet(alpha=alpha),
            n_workers=4,
            global_batch=4000,
            seed=0,
            tail="short",
        )
        own = [labels[order.local(0, worker, 4)] for worker in range(4)]
        return np.stack([np.bincount(part, minlength=10) for part in own])

    assert counts(0.5).sum(axis=1).tolist() == GOLDEN_DIRICHLET
    even, uneven = counts(1e4), counts(0.05)
    assert np.abs(even - 25).max() <= 3
    assert uneven.max(axis=0).mean() > 80  # most of a class lies with one worker


def test_a_tiny_alpha_gives_classes_whole_and_no_nan() -> None:
    labels = np.arange(400) % 40
    order = arrange(
        _source(labels),
        Dirichlet(alpha=1e-6),
        n_workers=2,
        global_batch=1000,
        seed=0,
        tail="short",
    )
    own = [set(labels[order.local(0, worker, 2)].tolist()) for worker in range(2)]
    assert not own[0] & own[1]


def test_few_classes_each() -> None:
    labels = np.repeat(np.arange(10), 60)
    order = arrange(
        _source(labels),
        Classes(per_worker=2),
        n_workers=10,
        global_batch=600,
        seed=3,
        tail="short",
    )
    for worker in range(10):
        own = labels[order.local(0, worker, 10)]
        assert len(own) == 60
        assert len(set(own.tolist())) <= 2


def test_workers_without_data_are_named() -> None:
    with pytest.raises(ConfigError, match="worker 3, 4 of 5 without samples"):
        arrange(
            _source(np.zeros(3, dtype=np.int64)),
            "iid",
            n_workers=5,
            global_batch=5,
            seed=0,
            tail="short",
        )


def test_a_batch_smaller_than_the_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch"):
        arrange(_source(np.zeros(30)), "iid", n_workers=5, global_batch=4, seed=0, tail="short")


@pytest.mark.parametrize("tail", TAILS)
def test_seven_batches_against_five_take_equal_steps(tail: str) -> None:
    """Workers with unequal data once hung, one waiting for a step the other never took."""
    parts = [np.arange(14), np.arange(14, 24)]
    order = Partitioned(parts, global_batch=4, seed=0, tail=tail)
    assert order.steps_per_epoch == 6
    read = [[order.local(step, worker, 2) for step in range(6)] for worker in range(2)]
    assert [len(batch) for batch in read[0] + read[1]] == [2] * 12
    assert sorted(np.concatenate(read[1][:5])) == list(range(14, 24))
    assert set(np.concatenate(read[1])) == set(range(14, 24))
    assert [order.epoch(step, 1, 2) for step in range(6)] == [0, 0, 0, 0, 0, 1]


def test_a_workers_stream_does_not_depend_on_the_others() -> None:
    own = np.arange(14)
    few = Partitioned([own, np.arange(14, 24)], global_batch=4, seed=0, tail="wrap")
    many = Partitioned([own, np.arange(30, 90)], global_batch=4, seed=0, tail="wrap")
    for step in range(20):
        assert few.local(step, 0, 2).tolist() == many.local(step, 0, 2).tolist()


def test_drop_names_the_worker_that_cannot_fill_a_batch() -> None:
    parts = [np.arange(20), np.arange(20, 23)]
    with pytest.raises(ConfigError, match=r"worker 1 \(3 of 4\)"):
        Partitioned(parts, global_batch=8, seed=0, tail="drop")
    assert len(Partitioned(parts, global_batch=8, seed=0, tail="wrap").local(0, 1, 2)) == 4
