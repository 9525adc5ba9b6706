"""What a block costs: pulled or computed."""

from __future__ import annotations

import pytest

from kvass.common.costs import Costs


def test_pulls_at_once_share_the_way() -> None:
    """Ten that take ten times as long together are as fast as one alone."""
    alone, together = Costs(1_000.0), Costs(1_000.0)
    for _ in range(50):
        with alone.pulling():
            alone.pulled(1_000_000, 0.01)
    for _ in range(5):
        pulls = [together.pulling() for _ in range(10)]
        for pull in pulls:
            pull.__enter__()
        for _ in pulls:
            together.pulled(1_000_000, 0.1)
        for pull in pulls:
            pull.__exit__(None, None, None)
    assert alone.bytes_per_s == pytest.approx(together.bytes_per_s, rel=0.01)
    assert alone.loading_pays(100_000, 16) and not alone.loading_pays(10_000_000, 16)


def test_a_pull_that_fails_is_not_counted_any_more() -> None:
    costs = Costs(1_000.0)
    with pytest.raises(RuntimeError), costs.pulling():
        raise RuntimeError
    with costs.pulling():
        for _ in range(50):
            costs.pulled(1_000_000, 0.01)
    assert costs.bytes_per_s == pytest.approx(1e8, rel=0.01)
