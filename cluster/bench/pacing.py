"""Sends many requests, each at its time, and waits for their ends within one limit. Knows no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from blockferry.cluster.bench.load import Answer, Prompt

Sender = Callable[[Prompt], Coroutine[Any, Any, Answer]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are sent, and how many and how long at most."""

    arrivals_s: Iterable[float]  # of each request, since the start, ascending; all 0: as slots come free
    num_slots: int  # at most so many at a time
    max_duration_s: float


async def send_all(prompts: Sequence[Prompt], send: Sender, pace: Pace) -> list[Answer]:
    """Send every prompt at its time; whatever has not ended after max_duration_s counts as failed."""
    slots = asyncio.Semaphore(pace.num_slots)

    async def send_in_slot(prompt: Prompt) -> Answer:
        async with slots:
            return await send(prompt)

    tasks: list[asyncio.Task[Answer]] = []
    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(pace.max_duration_s):
            for prompt, arrival_s in zip(prompts, pace.arrivals_s):
                pause_s = start_s + arrival_s - time.perf_counter()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                tasks.append(asyncio.create_task(send_in_slot(prompt)))
            await asyncio.wait(tasks)
    except TimeoutError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    late = f"not ended within {pace.max_duration_s:g} s"
    ended = [None if task.cancelled() else task.result() for task in tasks]
    ended.extend([None] * (len(prompts) - len(tasks)))
    return [
        answer or Answer(num_prompt_tokens=len(prompt.token_ids), error=late) for answer, prompt in zip(ended, prompts)
    ]
