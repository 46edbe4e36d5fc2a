"""Fixtures and paths that every test shares."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.triton_interpreter import interpret_kernels

interpret_kernels()
