"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file and its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(payload)
    beside.replace(path)
