"""Requests over HTTP while things break: every answer is held against the text of a run without faults.

Runs in a test's process, and as a program beside a server elsewhere: python fault_load.py ARGUMENTS.json, which prints
the outcome as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

Prompt = Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Who asks what, how often, and how patiently."""

    url: str
    prompts: Sequence[Prompt]
    expected: Sequence[str]  # by prompt
    num_requests: int
    concurrency: int
    max_tokens: int
    limit_s: float  # no request may take longer: the bound on hangs
    leaving: float = 0.0  # share of clients that hang up at a random moment
    seed: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a load's requests. num_exact + num_errors + num_left + len(wrong) + num_hung are all of them."""

    num_exact: int = 0
    num_errors: int = 0
    num_left: int = 0
    num_hung: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return self.num_exact + self.num_errors + self.num_left + self.num_hung + len(self.wrong)


def body(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def fault_free(url: str, prompts: Sequence[Prompt], max_tokens: int) -> list[str]:
    """What every prompt is answered while nothing breaks."""
    texts = []
    with httpx.Client(base_url=url, timeout=120) as http:
        for prompt in prompts:
            answer = http.post("/v1/completions", json=body(prompt, max_tokens))
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
    return texts


async def run_load(load: Load) -> Outcome:
    """Send everything, `concurrency` at a time."""
    outcome, draw = Outcome(), random.Random(load.seed)
    numbers = iter(range(load.num_requests))
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=load.url, timeout=None, limits=limits) as http:

        async def one_after_another() -> None:
            for _ in numbers:
                await _ask_in_time(http, load, draw, outcome)

        await asyncio.gather(*(one_after_another() for _ in range(load.concurrency)))
    return outcome


async def _ask_in_time(http: httpx.AsyncClient, load: Load, draw: random.Random, outcome: Outcome) -> None:
    number = draw.randrange(len(load.prompts))
    patience_s = draw.uniform(0.0, 1.0) ** 2 * 2.0 if draw.random() < load.leaving else None
    is_streamed = draw.random() < 0.5
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(patience_s or load.limit_s):
            ask = stream if is_streamed else _complete
            text, error = await ask(http, body(load.prompts[number], load.max_tokens))
    except TimeoutError:
        if patience_s is None:
            outcome.num_hung += 1
        else:
            outcome.num_left += 1
        return
    if patience_s is None:
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - started_s)
    expected = load.expected[number]
    if error and expected.startswith(text):
        outcome.num_errors += 1
        outcome.errors[error] = outcome.errors.get(error, 0) + 1
    elif text == expected and not error:
        outcome.num_exact += 1
    else:
        outcome.wrong.append(f"prompt {number}: {text!r} instead of {expected!r} ({error})")


async def _complete(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, str]:
    """Text and error of a plain answer."""
    answer = await http.post("/v1/completions", json=request)
    document = answer.json()
    if answer.status_code != 200:
        return "", str(document["error"]["message"])
    return document["choices"][0]["text"], ""


async def stream(
    http: httpx.AsyncClient, request: dict[str, Any], on_text: Callable[[], None] = lambda: None
) -> tuple[str, str]:
    """Text and error of a streamed answer; on_text is called for every chunk."""
    text, is_done = "", False
    async with http.stream("POST", "/v1/completions", json=request | {"stream": True}) as answer:
        if answer.status_code != 200:
            return "", str(json.loads(await answer.aread())["error"]["message"])
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return text, str(chunk["error"]["message"])
                text += chunk["choices"][0]["text"]
                on_text()
    return (text, "") if is_done else (text, "the stream broke off without a word")


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    expected = arguments["expected"] or fault_free(arguments["url"], arguments["prompts"], arguments["max_tokens"])
    outcome = asyncio.run(run_load(Load(**arguments | {"expected": expected})))
    print(json.dumps({"expected": expected, "outcome": dataclasses.asdict(outcome)}))


if __name__ == "__main__":
    main()
