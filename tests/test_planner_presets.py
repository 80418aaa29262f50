"""Whole models over whole clusters: plans that checks accept."""

from __future__ import annotations

import pytest

from polyreme import spec as specs
from polyreme.api import problem as problems
from polyreme.api import steps
from polyreme.plan.check import check
from polyreme.planner.search import search

MODELS = ("llama-7b", "llama3-8b", "qwen3-8b", "bert-huge", "t5-large")
CLUSTERS = ("preset:4xH100", "preset:16xA100", "preset:32xH100")
LENGTHS = {"bert-huge": 512, "t5-large": 512}


def _planned(model, cluster):
    train = {"steps": 1, "global_batch": 64, "precision": "bf16"}
    spec = specs.parse(
        {
            "model": {"preset": model},
            "data": {"kind": "tokens", "path": "tokens.bin", "vocab": 30000},
            "train": {**train, "seq_len": LENGTHS.get(model, 2048)},
        },
        trusted=("data",),
    )
    problem = problems.pose(spec, cluster=cluster)
    profile = steps.assumed_profile(problem)
    given = problem.graph, problem.cluster, profile, problem.workload, spec.parallel
    return problem, search(*given, top=3)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.long
def test_the_best_plans_of_a_model_on_a_cluster_are_valid(model, cluster):
    problem, plans = _planned(model, cluster)
    found = plans[0].search
    assert found.objective_s >= found.bound_s > 0
    steps_s = [plan.estimate.step_s for plan in plans]
    assert steps_s == sorted(steps_s)
    for plan in plans:
        assert check(plan, problem.graph, problem.cluster, problem.workload) == []
        kinds = problem.cluster.device_types.values()
        have = min(kind.memory_bytes for kind in kinds)
        assert all(sum(causes.values()) <= have for causes in plan.estimate.memory)
