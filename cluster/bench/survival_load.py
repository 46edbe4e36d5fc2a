"""Streams of one deployment that are watched while something of it dies, each held against its fault-free text.

Talks HTTP only. Every stream ends in one Fate; nothing waits longer than its limit.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from blockferry.cluster.bench.load import Endpoint

MAX_ERROR_CHARS = 200


class Fate(enum.StrEnum):
    """What became of one stream."""

    EXACT = "exact"  # the fault-free text, whole
    ERROR = "error"  # an error that says so, behind a true beginning of the text
    CUT = "cut"  # the connection ended without a word, behind a true beginning
    HUNG = "hung"  # not ended within its limit
    WRONG = "wrong"  # anything else: a token too many, too few, or another one


@dataclasses.dataclass(slots=True, kw_only=True)
class Stream:
    """One stream as its client sees it. Mutated by its task only."""

    prompt: Sequence[int]
    expected: str  # "": not known yet, whatever comes is right
    text: str = ""
    num_events: int = 0
    longest_pause_s: float = 0.0
    error: str = ""
    is_done: bool = False  # the server said that all was sent
    is_late: bool = False

    @property
    def fate(self) -> Fate:
        """Of a stream that has ended."""
        if self.is_late:
            return Fate.HUNG
        if self.is_done and not self.error:
            return Fate.EXACT if self.expected in {"", self.text} else Fate.WRONG
        if not self.expected.startswith(self.text):
            return Fate.WRONG
        return Fate.ERROR if self.error else Fate.CUT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How streams are asked for."""

    session: aiohttp.ClientSession
    endpoint: Endpoint
    max_tokens: int
    limit_s: float  # of one stream

    async def run(self, stream: Stream) -> None:
        """Ask, and follow the answer to its end."""
        try:
            async with asyncio.timeout(self.limit_s):
                await self._follow(stream)
        except TimeoutError:
            stream.is_late = True
        except aiohttp.ClientResponseError as error:
            stream.error = error.message
        except (aiohttp.ClientError, ConnectionError):
            pass  # what has come is what there is

    async def _follow(self, stream: Stream) -> None:
        body = {
            "model": self.endpoint.model,
            "prompt": list(stream.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        before_s = time.monotonic()
        async with self.session.post(f"{self.endpoint.url}/completions", json=body) as response:
            if response.status != 200:
                stream.error = _message_of(await response.text())
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    now_s = time.monotonic()
                    stream.longest_pause_s = max(stream.longest_pause_s, now_s - before_s)
                    before_s = now_s
                    _take(stream, line.removeprefix(b"data: ").strip())


def _take(stream: Stream, data: bytes) -> None:
    if data == b"[DONE]":
        stream.is_done = True
        return
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        stream.error = str(chunk["error"]["message"])[:MAX_ERROR_CHARS]
        return
    stream.num_events += 1
    stream.text += "".join(choice["text"] for choice in chunk["choices"])


def _message_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:MAX_ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return text[:MAX_ERROR_CHARS] or "an empty answer"


def count_fates(streams: Sequence[Stream]) -> dict[Fate, int]:
    """How many streams met which fate; all of them are named."""
    counted = collections.Counter(stream.fate for stream in streams)
    return {fate: counted[fate] for fate in Fate}
