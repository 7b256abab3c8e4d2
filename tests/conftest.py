"""Options that all Python tests share."""

import pytest

SOAK_REPETITIONS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help=f"run only tests marked soak, each of them {SOAK_REPETITIONS} times"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("soak") is not None
    if metafunc.config.getoption("soak") and marked:
        metafunc.fixturenames.append("soak_repetition")
        metafunc.parametrize("soak_repetition", range(SOAK_REPETITIONS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("soak"):
        chosen = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
