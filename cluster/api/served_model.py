"""The one model that a server answers for: its names, limits, tokenizer and default sampling.

Read from the checkpoint's folder once at start; frozen afterwards. Loads no weights and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockferry.cluster.api.errors import ApiError, shown
from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.engine.config import ModelConfig
from blockferry.engine.errors import ModelLoadError

# generation_config.json may set these; a request's own value wins (vLLM's --generation-config auto).
DEFAULT_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the API must know of the model."""

    name: str
    root: str
    max_model_len: int
    vocab_size: int  # rows of the embedding: ids below it are valid input
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    tokenizer: Tokenizer
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, model: ModelConfig, *, chat_template: Path | None = None) -> ServedModel:
        """Read config, generation config and tokenizer. Raises ModelLoadError."""
        tokenizer = Tokenizer.load(model.path, chat_template=chat_template)
        config = _read_json(model.path / "config.json")
        generation = _read_json(model.path / "generation_config.json")
        text_config = config.get("text_config", config)
        eos: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        for source in (text_config, generation):
            ids = source.get("eos_token_id")
            eos.update([ids] if isinstance(ids, int) else ids or ())
        return cls(
            name=model.served_name,
            root=model.name,
            max_model_len=model.max_model_len,
            vocab_size=int(text_config.get("vocab_size", tokenizer.num_tokens)),
            eos_token_ids=tuple(sorted(eos)),
            default_sampling={k: generation[k] for k in DEFAULT_SAMPLING if generation.get(k) is not None},
            tokenizer=tokenizer,
        )

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name with 404; no name means this one."""
        if name is not None and name != self.name:
            raise ApiError(
                f"model={shown(name)} is not served here; use {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def card(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created_s,
            "owned_by": "blockferry",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,  # what a benchmark needs to make prompts of token ids
        }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
