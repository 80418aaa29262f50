"""Random legal plans compute what one process computes."""

from __future__ import annotations

import pytest

from beside import Family, beside
from drawn import FAMILIES, draw

N_PLANS = 120


@pytest.mark.slice(12)
@pytest.mark.parametrize("seed", range(N_PLANS))
def test_a_random_plan_computes_what_one_process_does(pool, seed):
    drawn = draw(seed)
    options, sample = FAMILIES[drawn.family]
    case = Family(
        options=options,
        sample=sample,
        plan=dict(drawn.plan),
        global_batch=drawn.global_batch,
        clip_norm=0.5,
    )
    verdicts = pool(drawn.n_processes).run(beside, case, None, 2, timeout_s=120)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0].first is None, (drawn, verdicts[0].first)
    assert verdicts[0].steps == 2
