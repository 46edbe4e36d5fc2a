"""The text that a model wrote, on disk: parts of many sequences, each written whole or not at all.

    WORK/text/00007.npz     one part

Owns the folder `text` of a work folder.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.engine.request import Int32Array
from blockferry.engine.spec_decode.training.files import write_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """One sequence: what the model was given and what it wrote."""

    token_ids: Int32Array
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        """That the model wrote."""
        return len(self.token_ids) - self.num_prompt_tokens


def save_writings(path: Path, writings: Sequence[Writing]) -> None:
    """Write one part."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        token_ids=np.concatenate([one.token_ids for one in writings]).astype(np.int32),
        lengths=np.array([len(one.token_ids) for one in writings], np.int32),
        prompt_lengths=np.array([one.num_prompt_tokens for one in writings], np.int32),
    )
    write_bytes(path, buffer.getvalue())


def load_writings(path: Path) -> list[Writing]:
    """Read one part."""
    with np.load(path) as part:
        sequences = np.split(part["token_ids"], np.cumsum(part["lengths"])[:-1])
        prompt_lengths = part["prompt_lengths"].tolist()
    return [
        Writing(token_ids=token_ids, num_prompt_tokens=num_prompt_tokens)
        for token_ids, num_prompt_tokens in zip(sequences, prompt_lengths, strict=True)
    ]
