"""One streamed request to an OpenAI endpoint, timed; and what must be asked of the server before.

Parses no more than it must while tokens arrive: the client shares its cores with the server it measures.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

MAX_ERROR_CHARS = 300


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one request went; durations in seconds from its sending."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None: the server does not say
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: Sequence[float] = ()  # between consecutive events
    error: str = ""  # not empty: the numbers above mean nothing
    events: Sequence[bytes] = ()  # as they came, each "data: {...}" of one choice

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def text(self) -> str:
        """What was answered; parsed when it is asked for, not while tokens arrive."""
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in self.events]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's token ids and the number of tokens to be generated for it."""

    token_ids: list[int]
    num_output_tokens: int
    ignores_eos: bool = True  # False: at most so many tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model served at a base URL that ends in /v1."""

    url: str
    model: str


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Prompt) -> Answer:
    """Stream one completion. Failures come back as an Answer with an error, cancellation is passed on."""
    body = {
        "model": endpoint.model,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": prompt.ignores_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    failed = Answer(num_prompt_tokens=len(prompt.token_ids))
    try:
        return await _stream(session, f"{endpoint.url}/completions", body, prompt)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return dataclasses.replace(failed, error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], prompt: Prompt) -> Answer:
    """Raises ClientError, TimeoutError or ValueError (an error object, or a stream that breaks off)."""
    times: list[float] = []
    events_seen: list[bytes] = []
    rest = b""
    is_complete = False
    start_s = time.perf_counter()
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {(await response.text())[:MAX_ERROR_CHARS]}")
        async for data in response.content.iter_any():
            now_s = time.perf_counter()
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if event.startswith(b"data: [DONE]"):
                    is_complete = True
                elif event.startswith(b"data: "):
                    times.append(now_s)
                    events_seen.append(event)
    end = json.loads(events_seen[-1].removeprefix(b"data: ")) if events_seen else {}
    if not is_complete or "error" in end:
        raise ValueError(str(end.get("error", "the stream broke off"))[:MAX_ERROR_CHARS])
    if not end.get("choices"):
        times.pop()  # the usage chunk is no token
    if not times:
        raise ValueError("the stream held no token")
    usage = end.get("usage") or {}
    return Answer(
        num_prompt_tokens=usage.get("prompt_tokens", len(prompt.token_ids)),
        num_output_tokens=usage.get("completion_tokens", len(times)),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        ttft_s=times[0] - start_s,
        e2e_s=times[-1] - start_s,
        itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
        events=events_seen,
    )


async def find_model(session: aiohttp.ClientSession, url: str, name: str) -> dict[str, Any]:
    """The model card of `name`, or of the first model served. Raises ValueError with the reason."""
    try:
        async with session.get(f"{url}/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            if response.status != 200:
                raise ValueError(f"{url}/models answers HTTP {response.status}; is this an OpenAI endpoint?")
            cards: list[dict[str, Any]] = (await response.json(content_type=None))["data"]
    except (TimeoutError, aiohttp.ClientError, KeyError, TypeError) as error:
        raise ValueError(f"no OpenAI endpoint answers at {url}: {error or type(error).__name__}") from error
    for card in cards:
        if name in ("", card["id"]):
            return card
    raise ValueError(f"model {name!r} is not served at {url}; it serves {[card['id'] for card in cards]}")
