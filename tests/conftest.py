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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `slice(n)` only n rows, the same ones always, are not `long`.

    Or those with the ids that the mark names.
    """
    some = any("::" in argument for argument in config.args)
    rows: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slice"):
            rows[str(item.path), item.nodeid.partition("[")[0]].append(item)
    for (_, name), each in rows.items():
        asked = each[0].get_closest_marker("slice").args
        if isinstance(asked[0], int):
            kept = random.Random(name).sample(range(len(each)), min(asked[0], len(each)))
        else:
            ids = [item.nodeid.partition("[")[2].removesuffix("]") for item in each]
            if not some and not set(asked) <= set(ids):
                raise pytest.UsageError(f"{name}: no rows {set(asked) - set(ids)} to keep")
            kept = [number for number, row in enumerate(ids) if row in asked]
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
