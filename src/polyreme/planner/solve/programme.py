"""Mixed-integer linear programmes, and the solvers that take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, sparse

from .instance import Array

Terms = dict[int, float]  # coefficient of each variable


@dataclass
class Programme:
    """min cost x, subject to low <= A x <= high, x >= 0; the first `n_choices` are 0 or 1.

    So is every other but `longest` where these are.
    """

    n_choices: int
    cost: Terms = field(default_factory=dict)
    rows: list[Terms] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    n: int = 0
    longest: int = -1

    def variable(self) -> int:
        """A new one, at least 0."""
        self.n += 1
        return self.n - 1

    def hold(self, terms: Terms, low: float = -np.inf, high: float = np.inf) -> None:
        """A new row."""
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    @property
    def matrix(self) -> sparse.csr_matrix:
        """A."""
        data = [(r, c, v) for r, row in enumerate(self.rows) for c, v in row.items()]
        rows, columns, values = zip(*data, strict=True)
        return sparse.csr_matrix((values, (rows, columns)), shape=(len(self.rows), self.n))


Solve = Callable[[Programme, float], tuple[Array | None, float, bool]]


def _highs(programme: Programme, seconds: float) -> tuple[Array | None, float, bool]:
    cost = np.zeros(programme.n)
    cost[list(programme.cost)] = list(programme.cost.values())
    integral = np.arange(programme.n) < programme.n_choices
    result = optimize.milp(
        cost,
        integrality=integral.astype(int),
        bounds=optimize.Bounds(0, np.where(integral, 1.0, np.inf)),
        constraints=optimize.LinearConstraint(programme.matrix, programme.low, programme.high),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return None, np.inf, True
    bound = result.mip_dual_bound
    return result.x, 0.0 if bound is None else float(bound), result.status == 0


def _scip(programme: Programme, seconds: float) -> tuple[Array | None, float, bool]:
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(int(seconds * 1000))
    names = range(programme.n)
    x = [
        solver.BoolVar(f"x{at}")
        if at < programme.n_choices
        else solver.NumVar(0.0, solver.infinity(), f"x{at}")
        for at in names
    ]
    for terms, low, high in zip(programme.rows, programme.low, programme.high, strict=True):
        row = solver.Constraint(max(low, -solver.infinity()), min(high, solver.infinity()))
        for at, value in terms.items():
            row.SetCoefficient(x[at], value)
    for at, value in programme.cost.items():
        solver.Objective().SetCoefficient(x[at], value)
    solver.Objective().SetMinimization()
    gap = pywraplp.MPSolverParameters()
    gap.SetDoubleParam(pywraplp.MPSolverParameters.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(gap)
    if status == pywraplp.Solver.INFEASIBLE:
        return None, np.inf, True
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return None, 0.0, False
    values = np.array([each.solution_value() for each in x])
    return values, solver.Objective().BestBound(), status == pywraplp.Solver.OPTIMAL


_TIME_UNITS, _BYTE_UNITS = 2.0**28, 2.0**30  # with 2**40 CP-SAT 9.15 lost optima
_FACTOR = 2.0**12  # what alpha and beta are whole in


def _cp_sat(programme: Programme, seconds: float) -> tuple[Array | None, float, bool]:
    """In integers: times in 2**-28 of the largest, bytes in 2**-30 of a stage, rounded up.

    Flows between choices are whole where the choices are.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    unit = _TIME_UNITS / max(abs(value) for value in programme.cost.values())
    most = int(2 * unit * sum(abs(value) for value in programme.cost.values())) + 1
    x = [
        model.new_int_var(0, most, "longest") if at == programme.longest else model.new_bool_var("")
        for at in range(programme.n)
    ]
    for terms, low, high in zip(programme.rows, programme.low, programme.high, strict=True):
        scale = 1.0
        if programme.longest in terms:
            scale = unit
        elif not np.isfinite(low):  # bytes of a stage
            scale = _BYTE_UNITS / high
        whole = {
            at: int(value) if at == programme.longest else math.ceil(value * scale)
            for at, value in terms.items()
        }
        row = sum(value * x[at] for at, value in whole.items())
        if np.isfinite(low):
            model.add(row >= int(low))
        if np.isfinite(high):
            model.add(row <= math.floor(high * scale))
    model.minimize(
        sum(
            round(value * (_FACTOR if at == programme.longest else unit * _FACTOR)) * x[at]
            for at, value in programme.cost.items()
        )
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, np.inf, True
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, 0.0, False
    values = np.array([float(solver.value(each)) for each in x])
    return values, solver.best_objective_bound / unit / _FACTOR, status == cp_model.OPTIMAL


SOLVERS: Mapping[str, Solve] = {"highs": _highs, "scip": _scip, "cp-sat": _cp_sat}
