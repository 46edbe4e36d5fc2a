"""Deployment files, model configs and heads that draft, as they come with the package: found by bare name."""

from __future__ import annotations

import importlib.resources
from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """File names and places of the shipped deployment files."""
    folder = importlib.resources.files("blockferry.configs")
    return {entry.name: Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")}


def find_config(file: Path) -> Path:
    """`file` itself, or the shipped file that a bare name without a file of that name here means."""
    if file.exists() or file.parent != Path():
        return file
    return shipped_configs().get(file.name, file)


def shipped_models() -> dict[str, Path]:
    """Names and places of the shipped model configs: a config.json each, no weights."""
    folder = importlib.resources.files("blockferry.configs") / "models"
    return {Path(entry.name).stem: Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".json")}


def shipped_heads() -> dict[str, Path]:
    """Names and folders of the shipped heads that draft tokens for a model: config.json and model.safetensors."""
    folder = importlib.resources.files("blockferry.configs") / "models"
    return {entry.name: Path(str(entry)) for entry in folder.iterdir() if (entry / "config.json").is_file()}
