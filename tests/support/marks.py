"""Marks that tests of several files give to values they are run with."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def full(*values: object) -> list[ParameterSet]:
    """Values that only the full run takes."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]
