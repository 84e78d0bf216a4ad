from __future__ import annotations

import numpy as np
import pytest

from kamera_cli.bench.figures import Share, mean, percentile


def test_wilson_interval_is_the_published_one() -> None:
    low, high = Share(8, 10).interval
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_an_interval_stays_inside_zero_and_one_at_the_ends() -> None:
    assert Share(0, 7).interval[0] == 0.0
    assert Share(7, 7).interval[1] == 1.0
    assert Share(0, 7).interval[1] > 0.2


def test_nothing_to_count_is_null_and_not_nan() -> None:
    assert Share(0, 0).to_json() == {"accuracy": None, "low": None, "high": None, "count": 0}
    assert mean([]) is None
    assert percentile([], 95) is None


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_percentiles_agree_with_numpy(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    for percent in (0, 50, 95, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
