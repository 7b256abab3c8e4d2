"""Fixtures for tests that need several ranks."""

from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def repetitions(request: pytest.FixtureRequest) -> int:
    """How often an exactness test runs the same training. Under --soak the whole test is repeated anyway."""
    return 1 if request.config.getoption("--soak") else 2


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[int], Cluster]]:
    """`clusters(n)`: the launch of n ranks that all tests share."""
    running: dict[int, Cluster] = {}

    def get(ranks: int) -> Cluster:
        return running.setdefault(ranks, Cluster(ranks))

    yield get
    for cluster in running.values():
        cluster.close()
