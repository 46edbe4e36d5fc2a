"""Reads a Hugging Face folder of safetensors: only the slices a rank asks for, cast to the dtype it asks for.

Owns open file handles until close(). Builds no layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import read_json
from blockferry.engine.models.sharding import Span

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
_SAMPLE_BYTES = 4096


class Checkpoint:
    """The tensors of one model folder by name. Raises ModelLoadError for anything missing or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._where = _locate(path)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> KeysView[str]:
        """Of all tensors."""
        return self._where.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, small and of any shape, as it is stored."""
        part = self._slice(name)
        value: torch.Tensor = part[...] if part.get_shape() else self._files[self._where[name].name].get_tensor(name)
        return value

    def read_into(
        self,
        out: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> None:
        """Copy tensor `name`, which must have `shape`, or its rows/columns, into `out`, casting.

        `out` may have more rows than the slice (padding); those are left alone. Where it is on the meta device,
        name and shape are checked and nothing is read.
        """
        part = self._slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ModelLoadError(f"{self._where[name]}: tensor {name} has shape {found}, config.json says {shape}")
        if out.is_meta:
            return
        row = slice(None) if rows is None else slice(rows.start, rows.stop)
        if rows is not None and not len(rows):
            return
        try:
            value: torch.Tensor = part[row] if columns is None else part[row, columns.start : columns.stop]
        except SafetensorError as error:
            raise ModelLoadError(f"{self._where[name]}: tensor {name} cannot be read: {error}") from error
        out[: len(value)].copy_(value)

    def _slice(self, name: str) -> Any:
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(f"{self.path}: tensor {name} is in no safetensors file; the checkpoint is incomplete")
        handle = self._files.get(path.name)
        if handle is None:
            handle = self._files[path.name] = _open(path)
        try:
            return handle.get_slice(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name}: {error}") from error

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()


def fingerprint(path: Path) -> str:
    """Hex digest of what the model is: config, tensor names, shapes and stored dtypes, and a sample of each file.

    Equal on every host that holds the same checkpoint, wherever it lies; reads a few KiB per file.
    """
    digest = hashlib.sha256()
    config = read_json(path / "config.json")
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(identity, sort_keys=True).encode())
    for file in sorted(set(_locate(path).values())):
        header, sample = _read_header(file)
        header.pop("__metadata__", None)
        digest.update(json.dumps(header, sort_keys=True).encode())
        digest.update(sample)
    return digest.hexdigest()


def _locate(path: Path) -> Mapping[str, Path]:
    """Which file holds each tensor; every file named exists and has a readable header."""
    if not path.is_dir():
        raise ModelLoadError(f"model folder {path} does not exist; check the path or run `blockferry fetch-model`")
    if (path / _INDEX).exists():
        names = read_json(path / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise ModelLoadError(f"{path / _INDEX} has no weight_map; the index is corrupt")
        where = {str(name): path / str(file) for name, file in names.items()}
        for file in sorted(set(where.values())):
            if not file.is_file():
                raise ModelLoadError(f"{file} is named in {_INDEX} but does not exist; the checkpoint is incomplete")
        return where
    single = path / _SINGLE
    if not single.is_file():
        raise ModelLoadError(f"{path} holds neither {_SINGLE} nor {_INDEX}; only safetensors checkpoints can be loaded")
    header, _ = _read_header(single)
    return {name: single for name in header if name != "__metadata__"}


def _read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors header (8-byte length, JSON) and the first bytes of the data after it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelLoadError(f"{path} is not a complete safetensors file: {size} bytes; fetch it again")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path} has a corrupt safetensors header: {error}") from error
        if end != size - 8 - length:
            raise ModelLoadError(
                f"{path} has {size - 8 - length} bytes of weights, its header says {end}; fetch it again"
            )
        return header, file.read(min(_SAMPLE_BYTES, math.floor(end)))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
