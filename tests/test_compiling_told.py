"""That kernels are compiled is said, once, and only where they are."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

from polyreme import api
from polyreme.api import compiling
from polyreme.convex import kernels

KERNELS = """
import numba

@numba.njit(cache=True)
def once(x):
    return x + 1

@numba.njit(cache=True)
def twice(x):
    return once(once(x))
"""
SPEC = """
[model]
kind = "linear"
l2 = 1e-2
[data]
kind = "generated"
rows = 60
features = 5
per_row = 2
[train]
steps = 2
global_batch = 2
[data_parallel]
sync = { kind = "pSCOPE" }
[simulate]
workers = 2
"""


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_is_kept_is_not_called_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(KERNELS)
    said: list[str] = []
    with compiling.told(lambda: said.append("first")):
        fresh = _loaded(path)
        assert fresh.twice(1) == 3
        fresh.twice(1.0)
    assert said == ["first"]  # once, for three kernels
    with compiling.told(lambda: said.append("kept")):
        assert _loaded(path).twice(1) == 3
    assert said == ["first"]
    with compiling.told(lambda: said.append("of another type")):
        assert _loaded(path).twice(1j) == 2 + 1j
    assert said == ["first", "of another type"]
    _loaded(path).twice(1.5)  # nobody listens any more
    assert len(said) == 2


@pytest.mark.parametrize("progress", [True, False])
def test_a_simulation_says_it_to_who_waits_and_to_nobody_else(
    progress: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spec: dict[str, Any] = tomllib.loads(SPEC)
    api.simulate(spec, out=tmp_path / "warm", progress=progress)
    capfd.readouterr()
    api.simulate(spec, out=tmp_path / "kept", progress=progress)
    assert compiling.WORDS not in capfd.readouterr().err
    monkeypatch.setattr(kernels, "losses", numba.njit(kernels.losses.py_func))
    api.simulate(spec, out=tmp_path / "run", progress=progress)
    assert capfd.readouterr().err.count(compiling.WORDS) == progress
