"""Text to token ids and back, for one checkpoint.

Reads tokenizer.json with the `tokenizers` package alone (60 MB instead of the 260 MB that transformers and
torch take); only checkpoints without one go through transformers. Thread-safe: nothing changes after load.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from blockferry.cluster.api.chat_template import ChatTemplate
from blockferry.cluster.api.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from blockferry.engine.errors import ModelLoadError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one checkpoint, with its chat template if it has one."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None) -> None:
        """`config` is tokenizer_config.json."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        special_tokens = {
            name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name))) is not None
        }
        self.chat_template = None if template is None else ChatTemplate(template, special_tokens)
        self.num_tokens = backend.get_vocab_size(with_added_tokens=True)
        eos = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)
        self._vocabulary = _Vocabulary(backend)

    @classmethod
    def load(cls, folder: Path, *, chat_template: Path | None = None) -> Tokenizer:
        """Read a checkpoint's tokenizer; `chat_template` replaces its own. Raises ModelLoadError."""
        try:
            config = _read_json(folder / "tokenizer_config.json")
            template = _read_template(folder, config, chat_template)
            path = folder / "tokenizer.json"
            backend = tokenizers.Tokenizer.from_file(str(path)) if path.exists() else _convert(folder)
            return cls(backend, config, template)
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for a corrupt file
            raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {error}") from error

    def min_tokens_of(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, found without tokenizing it."""
        if not self._vocabulary.is_byte_level:
            return 0
        return len(text) // self._vocabulary.max_token_bytes

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Releases the interpreter lock while it works."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Raises OverflowError on ids beyond 32 bits."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for on its own, special tokens included; empty for an unused id."""
        return self._vocabulary.token_bytes(token_id)

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Start decoding a sequence that continues `context` (which is not shown)."""
        if self._vocabulary.is_byte_level:
            table = self._vocabulary.shown if skip_special_tokens else self._vocabulary.every
            return ByteLevelDetokenizer(table, context)

        def decode(token_ids: list[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, context)


class _ByteTable(list[bytes]):
    """Bytes by token id; ids past the tokenizer's end (padded embeddings) stand for nothing."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            return b""


class _Vocabulary:
    """Bytes of every token of a byte-level tokenizer, built once; of others, on demand."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.is_byte_level = _is_byte_level(json.loads(backend.to_str())["decoder"])
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.every = _ByteTable([b""] * (max(vocabulary.values(), default=-1) + 1))
        for text, token_id in vocabulary.items():
            self.every[token_id] = _bytes_of(text)
        self.shown = _ByteTable(self.every)
        for token_id, token in added.items():
            if token.special:
                self.shown[token_id] = b""
        self.max_token_bytes = max((len(entry) for entry in self.every), default=1) or 1

    def token_bytes(self, token_id: int) -> bytes:
        if self.is_byte_level:
            entry: bytes = self.every[token_id]
            return entry
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        steps = decoder["decoders"]
        return len(steps) == 1 and _is_byte_level(steps[0])
    return bool(decoder["type"] == "ByteLevel")


@functools.cache
def _byte_of_char() -> Mapping[str, int]:
    """The alphabet of byte-level BPE (GPT-2's encoder.py, bytes_to_unicode), reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _bytes_of(text: str) -> bytes:
    """A vocabulary entry's bytes; entries outside the alphabet (added tokens) stand for themselves."""
    alphabet = _byte_of_char()
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:
        return text.encode()


def _token_text(value: object) -> str | None:
    """tokenizer_config.json writes a special token as text or as a map with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _read_template(folder: Path, config: Mapping[str, Any], override: Path | None) -> str | None:
    """The override, chat_template.jinja, or tokenizer_config.json's (of several, the one named default)."""
    path = override or folder / "chat_template.jinja"
    if override is not None or path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named: Iterable[dict[str, str]] = template
        template = next((entry["template"] for entry in named if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """A tokenizer without tokenizer.json, through transformers' converters."""
    if not folder.is_dir():
        raise ModelLoadError(f"model folder {folder} does not exist")
    from transformers import AutoTokenizer  # heavy, and only for these checkpoints

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.is_fast:
        raise ModelLoadError(f"{folder} has no tokenizer.json and no fast tokenizer; save one with transformers first")
    return tokenizer.backend_tokenizer
