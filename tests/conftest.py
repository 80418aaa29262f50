"""What every test may use."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from polyreme.api import training, verifying
from polyreme.runtime.launch import PRELOAD, Launcher
from pool import Pool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `slice(n)` only n rows, the same ones always, are not `long`.

    With `slice(rows=...)` they are those of these numbers.
    """
    rows: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slice"):
            rows[str(item.path), item.nodeid.partition("[")[0]].append(item)
    for (_, name), each in rows.items():
        marker = each[0].get_closest_marker("slice")
        kept = marker.kwargs.get("rows")
        if kept is None:
            kept = random.Random(name).sample(range(len(each)), min(marker.args[0], len(each)))
        for number in set(range(len(each))) - set(kept):
            each[number].add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm processes: `pool(2).run(function, *args)` calls `function(world, *args)` in two."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def launcher_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher that has imported what training needs, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        launcher = Launcher((*PRELOAD, *training._PRELOAD))
    with launcher:
        yield launcher


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, launcher_of_runs: Launcher) -> None:
    """Runs of this process fork their ranks from that launcher; which saves its imports."""
    for module in (training, verifying):
        monkeypatch.setattr(module, "Launcher", lambda **_: nullcontext(launcher_of_runs))
