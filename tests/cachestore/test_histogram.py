import numpy as np
import pytest

from cachestore.histogram import Histogram, doubling

SECONDS = doubling(1e-6, 100, per_doubling=4)


def filled(values: list[float]) -> Histogram:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)
    return histogram


def test_of_nothing_every_share_is_0() -> None:
    assert filled([]).quantile(0.5) == 0.0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_a_quantile_is_too_large_by_a_class_at_most(share: float) -> None:
    seconds = np.random.default_rng(0).lognormal(mean=-9, sigma=2, size=10_000)
    found = filled(seconds.tolist()).quantile(share)
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert exact <= found <= exact * 1.19


def test_extremes_fall_into_the_outer_classes() -> None:
    histogram = filled([0.0])
    assert histogram.quantile(1.0) == 1e-6
    histogram.add(1e9)
    assert histogram.quantile(0.5) == 1e-6
    assert histogram.quantile(1.0) == SECONDS[-1]
    assert (histogram.counts[0], histogram.counts[-1]) == (1, 1)
    assert histogram.sum == 1e9


def test_a_bound_belongs_to_the_class_that_it_ends() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert histogram.counts == [1, 2, 1]


@pytest.mark.parametrize("step", [1, 3, 8])
def test_coarser_classes_count_what_the_finer_ones_do(step: int) -> None:
    values = np.random.default_rng(1).lognormal(mean=-6, sigma=5, size=1000).tolist()
    coarse = filled(values).coarser(step)
    again = Histogram(SECONDS[::step])
    for value in values:
        again.add(value)
    assert (coarse.bounds, coarse.counts) == (again.bounds, again.counts)
    assert coarse.sum == pytest.approx(sum(values))
