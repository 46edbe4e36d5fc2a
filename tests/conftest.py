"""Fixtures and paths that every test shares."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.parity_table import FEATURES, PROPERTY, RecordCell, write_table
from support.triton_interpreter import interpret_kernels

interpret_kernels()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The parity table (support.parity_table), and how long a soak is."""
    parser.addoption("--soak-requests", type=int, default=400, help="how many requests test_soak.py sends")
    parser.addoption("--soak-interval", type=float, default=60.0, help="seconds between two deaths of instances")
    parser.addoption("--parity-table", type=Path, default=None, help="write which family passed what to this file")


@pytest.fixture
def soak_requests(request: pytest.FixtureRequest) -> int:
    """How many requests a soak sends."""
    return int(request.config.getoption("--soak-requests"))


@pytest.fixture
def soak_interval_s(request: pytest.FixtureRequest) -> float:
    """Seconds between two deaths of instances in a soak."""
    return float(request.config.getoption("--soak-interval"))


@pytest.fixture
def record_cell(record_property: Callable[[str, object], None]) -> RecordCell:
    """Say that a family has shown a feature; call it last in a test."""

    def record(family: str, feature: str) -> None:
        assert feature in FEATURES, feature
        record_property(PROPERTY, (family, feature))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the table, if one was asked for."""
    file = config.getoption("--parity-table")
    if file is None:
        return
    passed = terminalreporter.stats.get("passed", [])
    cells = [value for report in passed for name, value in report.user_properties if name == PROPERTY]
    write_table(file, cells, dict.fromkeys(family for family, _ in cells))
