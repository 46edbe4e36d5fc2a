"""Log probabilities in the two shapes of OpenAI's API: the chat list and the older completion columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from blockferry.cluster.api.sequence import OutputToken
from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.engine.request import TokenLogprobs

MIN_LOGPROB = -9999.0  # vLLM's stand-in for -inf


def chat_logprobs(tokens: Iterable[OutputToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice: {"content": [{token, logprob, bytes, top_logprobs}]}."""
    return {"content": [_chat_entry(token.logprobs, tokenizer) for token in tokens]}


def _chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
    described = [_described(token_id, value, tokenizer) for token_id, value in zip(ids, values)]
    return described[0] | {"top_logprobs": described[1:]}


def _described(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLogprobs:
    """Builds `logprobs` of a completion choice: columns of equal length."""

    tokenizer: Tokenizer
    num_top: int
    shows_ids: bool  # "token_id:17" instead of text

    def columns(self, tokens: Iterable[OutputToken], *, offset: int = 0) -> dict[str, Any]:
        """Columns of generated tokens, whose text begins `offset` characters into the choice's text."""
        columns = _empty_columns()
        for token in tokens:
            self._append(columns, token.logprobs, token.text_offset + offset)
        return columns

    def prompt_columns(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Columns of an echoed prompt: `entries` describe tokens 1, 2, ...; the first token has none."""
        columns = _empty_columns()
        detokenizer = self.tokenizer.detokenizer((), skip_special_tokens=False)
        offset = 0
        for position, token_id in enumerate(token_ids):
            if 0 < position <= len(entries):
                self._append(columns, entries[position - 1], offset)
            else:
                columns["tokens"].append(self._name(token_id))
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                columns["text_offset"].append(offset)
            offset += len(detokenizer.push(token_id))
        return columns

    def _append(self, columns: dict[str, Any], entry: TokenLogprobs, offset: int) -> None:
        ids, values = entry.token_ids.tolist(), [_finite(value) for value in entry.logprobs.tolist()]
        columns["tokens"].append(self._name(ids[0]))
        columns["token_logprobs"].append(values[0])
        columns["text_offset"].append(offset)
        top: dict[str, float] = {}
        for token_id, value in [*zip(ids[1 : self.num_top + 1], values[1:]), (ids[0], values[0])]:
            top.setdefault(self._name(token_id), value)
        columns["top_logprobs"].append(top if self.num_top else None)

    def _name(self, token_id: int) -> str:
        if self.shows_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Columns one after the other."""
    return {name: first[name] + second[name] for name in first}


def _finite(logprob: float) -> float:
    """JSON has neither -inf nor NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def _empty_columns() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
