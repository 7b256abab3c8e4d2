"""The settings of all tests, and fixtures for those that need several ranks."""

from collections.abc import Callable, Iterator

import environment
import pytest
from cluster import Cluster

environment.apply()  # before a test imports PyTorch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="repeat 20 times what is repeated twice otherwise")


def pytest_report_header() -> str:
    return "settings: " + ", ".join(f"{name}: {value}" for name, value in environment.in_effect().items())


@pytest.fixture(scope="session")
def repetitions(request: pytest.FixtureRequest) -> int:
    """How often an exactness test runs the same training."""
    return 20 if request.config.getoption("--soak") else 2


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[..., Cluster]]:
    """`clusters(n)`: the launch of n ranks that all tests share. `clusters(n, folder)`: one that imports from `folder` first."""
    running: dict[tuple[int, tuple[str, ...]], Cluster] = {}

    def get(ranks: int, *first: str) -> Cluster:
        return running.setdefault((ranks, first), Cluster(ranks, *first))

    yield get
    for cluster in running.values():
        cluster.stop()
