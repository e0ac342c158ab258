import numpy as np
import pytest

from cachestore.latency import Latencies


def test_nothing_took_no_time() -> None:
    assert Latencies().quantile(0.5) == 0.0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_a_quantile_is_at_most_19_percent_too_long(share: float) -> None:
    seconds = np.random.default_rng(0).lognormal(mean=-9, sigma=2, size=10_000)
    latencies = Latencies()
    for each in seconds:
        latencies.add(float(each))
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert exact <= latencies.quantile(share) * (1 + 1e-9)
    assert latencies.quantile(share) <= exact * 1.19


def test_extremes_fall_into_the_outer_classes() -> None:
    latencies = Latencies()
    latencies.add(0.0)
    assert latencies.quantile(1.0) == 1e-6
    latencies.add(1e9)
    assert latencies.quantile(0.5) == 1e-6
    assert 28 < latencies.quantile(1.0) < 31
