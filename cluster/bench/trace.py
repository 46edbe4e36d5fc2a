"""Request traces in Mooncake's format (kvcache-ai/Mooncake, FAST25-release/traces): read, scaled, turned into prompts.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 tokens of the input]}

Equal ids stand for equal blocks after equal prefixes, so prompts are made of them block by block. Sends nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockferry.cluster.bench.load import Prompt

TRACE_BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace; after scaled(), of shorter blocks and other times."""

    arrival_s: float  # since the trace's start
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]  # one per block, the last of which may be short


def read_trace(file: Path, *, limit: int) -> list[TraceRequest]:
    """The first `limit` requests of a file, in order of arrival. Raises ValueError that names the line."""
    try:
        with file.open(encoding="utf-8") as lines:
            requests = [
                _parse(line, f"{file}:{number}") for number, line in enumerate(itertools.islice(lines, limit), 1)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a trace: {error}") from None
    if not requests:
        raise ValueError(f"{file} holds no request; name a trace of JSON lines")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse(line: str, where: str) -> TraceRequest:
    try:
        row: Any = json.loads(line)
        timestamp_ms, num_prompt_tokens, num_output_tokens = (row[key] for key in _KEYS)
        hash_ids = tuple(row["hash_ids"])
        numbers = (num_prompt_tokens, num_output_tokens, *hash_ids)
    except KeyError as error:
        raise ValueError(f"{where} has no {error.args[0]}; each line needs {', '.join(_KEYS)}, hash_ids") from None
    except (ValueError, TypeError):
        raise ValueError(
            f"{where} is no request of a trace: {line.strip()[:60]!r}; each line is a JSON object with "
            f"{', '.join(_KEYS)}, hash_ids"
        ) from None
    if not all(type(number) is int and number >= 0 for number in numbers) or not num_prompt_tokens:
        raise ValueError(f"{where}: lengths and hash_ids must be whole numbers, the input_length at least 1")
    if type(timestamp_ms) not in (int, float) or not timestamp_ms >= 0:
        raise ValueError(f"{where}: timestamp={timestamp_ms!r} is no time in ms")
    if len(hash_ids) != -(-num_prompt_tokens // TRACE_BLOCK_TOKENS):
        raise ValueError(
            f"{where}: {len(hash_ids)} hash_ids do not cover input_length={num_prompt_tokens}; a block is "
            f"{TRACE_BLOCK_TOKENS} tokens"
        )
    return TraceRequest(
        arrival_s=timestamp_ms / 1e3,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        hash_ids=hash_ids,
    )


def scaled(request: TraceRequest, *, block_tokens: int, speed: float) -> TraceRequest:
    """A request whose blocks are block_tokens long instead of 512, the output in proportion, `speed` times as early."""

    def shorter(num_tokens: int) -> int:
        return max(1, -(-num_tokens * block_tokens // TRACE_BLOCK_TOKENS))

    return dataclasses.replace(
        request,
        arrival_s=request.arrival_s / speed,
        num_prompt_tokens=shorter(request.num_prompt_tokens),
        num_output_tokens=shorter(request.num_output_tokens),
    )


def fitting(requests: Iterable[TraceRequest], *, max_model_len: int) -> list[TraceRequest]:
    """Those whose prompt leaves room for a token, outputs cut to what fits."""
    return [
        dataclasses.replace(
            request, num_output_tokens=min(request.num_output_tokens, max_model_len - request.num_prompt_tokens)
        )
        for request in requests
        if request.num_prompt_tokens < max_model_len
    ]


def ideal_hit_tokens(requests: Iterable[TraceRequest], *, block_tokens: int) -> int:
    """Prompt tokens that one instance with an endless cache would find, were each computed before the next one comes.

    At least one token of each prompt is computed.
    """
    seen: set[int] = set()
    total = 0
    for request in requests:
        num_blocks = sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        total += min(num_blocks * block_tokens, request.num_prompt_tokens - 1)
        seen.update(request.hash_ids)
    return total


def prompts_of(
    requests: Sequence[TraceRequest], *, block_tokens: int, token_range: tuple[int, int], seed: int
) -> list[Prompt]:
    """Prompts in which equal ids are equal blocks of tokens; ids of tokens are within [first, stop) of token_range."""
    blocks: dict[int, list[int]] = {}

    def block(hash_id: int) -> list[int]:
        if hash_id not in blocks:
            blocks[hash_id] = np.random.default_rng((seed, hash_id)).integers(*token_range, block_tokens).tolist()
        return blocks[hash_id]

    return [
        Prompt(
            token_ids=list(itertools.chain(*map(block, request.hash_ids)))[: request.num_prompt_tokens],
            num_output_tokens=request.num_output_tokens,
        )
        for request in requests
    ]
