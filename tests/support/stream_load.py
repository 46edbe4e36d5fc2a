"""Streams that all run at once while hosts are lost, and what /health says meanwhile.

A program for the launcher's namespace: python stream_load.py ARGUMENTS.json. It prints JSON lines: the fault-free
texts, that every stream has begun (the moment to break something), and what became of streams and health.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from fault_load import body, fault_free, stream

HEALTH_EVERY_S = 0.2


@dataclasses.dataclass(slots=True, kw_only=True)
class Stream:
    """What one client has seen. Times are of CLOCK_MONOTONIC, which all processes of the machine share."""

    prompt: int
    has_begun: bool = False
    text: str = ""
    error: str = ""
    ended_s: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Health:
    """An answer of /health that differs from the one before."""

    at_s: float
    status: int  # 0: no answer at all
    message: str = ""


async def run(arguments: dict[str, Any], streams: list[Stream], health: list[Health]) -> None:
    """Follow all streams to their ends, and /health for as long and watch_after_s more."""
    url, prompts = arguments["url"], arguments["prompts"]
    limits = httpx.Limits(max_connections=len(streams) + 1, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        watch = asyncio.create_task(_watch(http, health, streams))
        clients = [_follow(http, one, body(prompts[one.prompt], arguments["max_tokens"])) for one in streams]
        async with asyncio.timeout(arguments["limit_s"]):
            await asyncio.gather(*clients)
        await asyncio.sleep(arguments["watch_after_s"])
        watch.cancel()


async def _follow(http: httpx.AsyncClient, one: Stream, request: dict[str, Any]) -> None:
    def begin() -> None:
        one.has_begun = True

    one.text, one.error = await stream(http, request, begin)
    one.ended_s = time.monotonic()


async def _watch(http: httpx.AsyncClient, health: list[Health], streams: list[Stream]) -> None:
    is_told = False
    while True:
        try:
            answer = await http.get("/health", timeout=10.0)
            now = Health(at_s=time.monotonic(), status=answer.status_code, message=answer.text)
        except httpx.HTTPError as error:
            now = Health(at_s=time.monotonic(), status=0, message=repr(error))
        if not health or (health[-1].status, health[-1].message) != (now.status, now.message):
            health.append(now)
        if not is_told and all(one.has_begun for one in streams):
            is_told = True
            _tell({"begun": sum(one.ended_s == 0.0 for one in streams)})
        await asyncio.sleep(HEALTH_EVERY_S)


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    expected = arguments["expected"]
    if not expected:
        expected = fault_free(arguments["url"], arguments["prompts"], arguments["max_tokens"])
    _tell({"expected": expected})
    streams = [Stream(prompt=number % len(expected)) for number in range(arguments["num_streams"])]
    health: list[Health] = []
    asyncio.run(run(arguments, streams, health))
    _tell(
        {"streams": [dataclasses.asdict(one) for one in streams], "health": [dataclasses.asdict(one) for one in health]}
    )


if __name__ == "__main__":
    main()
