"""Attacks that a run cannot have, and aggregates that cannot count clients by what they own."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest
import torch

from hostile import Middle
from polyreme import api
from polyreme import spec as specs
from polyreme.algo.aggregate import CoordinateMedian
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync import FedAvg
from polyreme.errors import ConfigError, RunError
from workers import play

BASE = """
[model]
kind = "mlp"
hidden = [4]
[data]
kind = "digits"
[train]
steps = 2
[simulate]
workers = 6
"""


@pytest.mark.parametrize(
    ("changed", "path", "words"),
    [
        ("simulate.attack={kind='SignFlip',workers=[6]}", "workers[0]", "not among the 6"),
        ("simulate.attack={kind='SignFlip',workers=[2,2]}", "workers[1]", "named already"),
        ("simulate.attack={kind='SignFlip',workers=[]}", "workers", "1 or more items"),
        ("simulate.attack={kind='ALIE',workers=[1,2,3,4]}", "z", "n >= 3, f <= n / 2"),
        ("simulate.attack={kind='Mimic',workers=[1],worker=1}", "worker", "hostile itself"),
        ("simulate.attack={kind='Silence',workers=[0,1,2,3,4,5]}", "", "none of the 6"),
        (
            "simulate.attack=[{kind='Silence',workers=[1]},{kind='Noise',workers=[3,1]}]",
            "[1].workers[1]",
            "hostile in simulate.attack[0]",
        ),
    ],
)
def test_workers_that_cannot_be_hostile_are_refused(changed: str, path: str, words: str) -> None:
    found = _refused(changed)
    joint = "" if path.startswith("[") or not path else "."
    assert [each.path for each in found] == [f"simulate.attack{joint}{path}"]
    assert words in str(found[0])


ONE = "simulate.attack={{kind='{0}',workers=[1]}}"


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ("data_parallel.sync.kind=ASGD", "ALIE", "each comes alone"),
        ("data_parallel.sync.kind=ADPSGD", "SignFlip", "models go from worker to worker"),
        ("data_parallel.topology.kind=Gossip", "Silence", "Gossip"),
        ("data_parallel.compress.kind=PowerSGD", "InnerProduct", "PowerSGD"),
        ("data_parallel.topology={kind='ParameterServer',servers=2}", "Mimic", "whole"),
    ],
)
def test_attacks_that_an_algorithm_leaves_no_room_for_are_refused_by_name(
    changed: str, kind: str, words: str
) -> None:
    more = ["data_parallel.aggregate.kind=MajorityVote"] if kind == "Mimic" else []
    found = _refused(changed, ONE.format(kind), *more)
    assert [(each.path, each.value) for each in found] == [("simulate.attack.kind", kind)]
    assert words in found[0].rule
    assert not _refused(changed, ONE.format("LabelFlip"), *more)


def _refused(*changed: str) -> list[Any]:
    try:
        specs.parse(tomllib.loads(BASE), changed)
    except ConfigError as error:
        return list(error.violations)
    return []


def _gradient(rank: int, batch: int, params: torch.Tensor) -> torch.Tensor:
    drawn = np.random.default_rng((rank, batch)).normal(size=params.numel())
    return torch.from_numpy(drawn).float() + params


def test_clients_that_count_by_samples_need_an_aggregate_that_takes_weights() -> None:
    """Of unequal data: weighted, or refused by name; never counted alike in silence."""
    partition = "data.partition={kind='dirichlet',alpha=0.5}"
    votes, fed = "data_parallel.aggregate.kind=MajorityVote", "data_parallel.sync.kind=FedAvg"
    (found,) = _refused(partition, fed, votes)
    assert found.path == "data_parallel.aggregate.kind"
    assert "MajorityVote" in str(found)
    assert "takes no weights" in found.rule
    assert not _refused(partition, fed)
    assert not _refused(partition, votes, "data_parallel.sync={kind='FedAvg',alike=true}")
    assert not _refused(fed, votes)


def test_a_robust_aggregate_without_weights_is_refused_where_samples_are_told_at_last() -> None:
    algorithm = DataParallel(rule=SGD(lr=0.1), sync=FedAvg(batches=1), aggregate=Middle())
    start, samples = torch.zeros(3), (3, 8, 1)
    with pytest.raises(ConfigError, match="Middle"):
        play(algorithm, _gradient, start, 3, 1, samples=samples)
    alike = DataParallel(rule=SGD(lr=0.1), sync=FedAvg(batches=1, alike=True), aggregate=Middle())
    found = play(alike, _gradient, start, 3, 1, samples=samples)
    gradients = torch.stack([_gradient(rank, 0, start) for rank in range(3)])
    middle = gradients[gradients.sum(1).argsort()[1]]
    torch.testing.assert_close(found.params[-1][0], -0.1 * middle)


def test_clients_that_count_alike_go_the_plain_mean_of_their_ways() -> None:
    algorithm = DataParallel(rule=SGD(lr=0.1), sync=FedAvg(batches=1, alike=True))
    start = torch.zeros(3)
    found = play(algorithm, _gradient, start, 3, 1, samples=(3, 0, 9))
    wanted = -0.1 * (_gradient(0, 0, start) + _gradient(2, 0, start)) / 2
    torch.testing.assert_close(found.params[-1][0], wanted)


def test_clients_that_own_more_count_more_in_an_aggregate_that_takes_weights() -> None:
    """The median of samples is where most samples are; of clients alike it is another one's."""
    start, samples = torch.zeros(3), (3, 8, 1)
    gradients = torch.stack([_gradient(rank, 0, start) for rank in range(3)])
    for alike, wanted in ((False, gradients[1]), (True, gradients.median(0).values)):
        algorithm = DataParallel(
            rule=SGD(lr=0.1),
            sync=FedAvg(batches=1, alike=alike),
            aggregate=CoordinateMedian(byzantine=1),
        )
        found = play(algorithm, _gradient, start, 3, 1, samples=samples)
        torch.testing.assert_close(found.params[-1][0], -0.1 * wanted)


def test_workers_that_wait_for_a_silent_one_do_not_wait_for_ever(tmp_path) -> None:
    """On a virtual clock the silent one computed on, and no signal ended it."""
    path = tmp_path / "spec.toml"
    path.write_text(BASE)
    changed = ["train.steps=6", "data_parallel.sync.kind=SSP", ONE.format("Silence")]
    with pytest.raises(RunError, match=r"workers 1 are hostile and silent"):
        api.simulate(path, out=tmp_path / "run", overrides=changed)


def test_a_check_holds_attacks_against_the_workers_that_it_is_told(tmp_path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(BASE)
    changed = ["simulate.attack={kind='SignFlip',workers=[4]}"]
    api.check(path, overrides=changed)
    with pytest.raises(ConfigError, match="not among the 4"):
        api.check(path, overrides=changed, workers=4)


def test_what_is_legal_instead_of_an_attack_is_what_is_played() -> None:
    (asynchronous,) = _refused("data_parallel.sync.kind=ASGD", ONE.format("ALIE"))
    assert '"Silence"' in asynchronous.legal
    assert '"Mimic"' not in asynchronous.legal
    (between,) = _refused("data_parallel.sync.kind=ADPSGD", ONE.format("SignFlip"))
    assert between.legal == '"LabelFlip"'
