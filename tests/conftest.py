"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm processes: `pool(2).run(function, *args)` calls `function(world, *args)` in two."""
    pool = Pool()
    yield pool
    pool.close()
