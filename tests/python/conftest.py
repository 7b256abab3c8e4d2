"""Fixtures for tests that need several ranks."""

from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="repeat 20 times what is repeated twice otherwise")


@pytest.fixture(scope="session")
def repetitions(request: pytest.FixtureRequest) -> int:
    """How often an exactness test runs the same training."""
    return 20 if request.config.getoption("--soak") else 2


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[int], Cluster]]:
    """`clusters(n)`: the launch of n ranks that all tests share."""
    running: dict[int, Cluster] = {}

    def get(ranks: int) -> Cluster:
        return running.setdefault(ranks, Cluster(ranks))

    yield get
    for cluster in running.values():
        cluster.close()
