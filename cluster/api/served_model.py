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

import numpy as np

from blockferry.cluster.api.errors import ApiError, shown
from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.engine.config import ModelConfig
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig as HfConfig
from blockferry.engine.kv.model_layers import num_encoder_tokens
from blockferry.engine.request import Int32Array

# generation_config.json may set these; a request's own value wins (vLLM's --generation-config auto).
DEFAULT_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Of a model whose encoder reads the caller's prompt, and whose decoder starts by itself."""

    max_input_tokens: int
    decoder_prompt: tuple[int, ...]  # the start token, and the one that the model is to begin with, if it names one

    @classmethod
    def read(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> EncoderDecoder | None:
        """None for any other model. Raises ModelLoadError where nothing says how the decoder starts."""
        max_input_tokens = num_encoder_tokens(HfConfig(config))
        if not max_input_tokens:
            return None
        both = {**config, **{key: value for key, value in generation.items() if value is not None}}
        start = both.get("decoder_start_token_id", both.get("bos_token_id"))
        if not isinstance(start, int):
            raise ModelLoadError(f"decoder_start_token_id={shown(start)} is no token id; config.json must name one")
        forced = both.get("forced_bos_token_id")
        decoder_prompt = (start, forced) if isinstance(forced, int) else (start,)
        return cls(max_input_tokens=max_input_tokens, decoder_prompt=decoder_prompt)


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
    encoder_decoder: EncoderDecoder | None = None
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
            encoder_decoder=EncoderDecoder.read(config, generation),
        )

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that could be read."""
        return self.max_model_len if self.encoder_decoder is None else self.encoder_decoder.max_input_tokens

    def context_of(self, prompt_token_ids: Int32Array) -> Int32Array:
        """What the answer continues: the prompt, or what the decoder starts with."""
        if self.encoder_decoder is None:
            return prompt_token_ids
        return np.array(self.encoder_decoder.decoder_prompt, np.int32)

    def encoder_input(self, prompt_token_ids: Int32Array) -> Int32Array | None:
        """What an encoder reads: the prompt; None for a model without one."""
        return None if self.encoder_decoder is None else prompt_token_ids

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
