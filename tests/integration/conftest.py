"""Fixtures that integration tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def families_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny checkpoints are built, once per session; see support.tiny_families."""
    return tmp_path_factory.getbasetemp() / "tiny_families"
