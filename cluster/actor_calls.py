"""Calls to actors, awaited by one event loop: their results, or one line that names the actor and the phase.

Owns no actor. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from blockferry.cluster.launch_progress import Progress, Report
from blockferry.engine.errors import BlockferryError

STEP_TIMEOUT_S = 120.0  # every phase but loading
STOP_TIMEOUT_S = 5.0
POLL_S = 0.05


class LaunchError(BlockferryError):
    """A deployment, or a part of it, did not come up; the message names the actor and the phase."""


async def gather(
    calls: Mapping[str, Any], phase: str, report: Report, *, timeout_s: float = STEP_TIMEOUT_S
) -> list[Any]:
    """Results of actor calls in order, given by their actors' names. Raises LaunchError for the first that failed."""
    deadline_s = time.monotonic() + timeout_s
    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    report(Progress(phase=phase, done=0, total=len(calls)))
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        for reference in done:
            failure = failure_of(reference)
            if failure:
                raise LaunchError(f"{names[reference]}, {phase}: {failure}")
        if done:
            report(Progress(phase=phase, done=len(calls) - len(pending), total=len(calls)))
        if pending and time.monotonic() > deadline_s:
            raise LaunchError(f"{names[pending[0]]}, {phase}: not done within {timeout_s:g} s")
        if pending:
            await asyncio.sleep(POLL_S)
    results: list[Any] = ray.get(list(calls.values()))
    return results


def wait_for(references: Sequence[Any]) -> list[Any]:
    """Wait for all of them, up to STOP_TIMEOUT_S, without an event loop; those that have an answer."""
    if not references:
        return []
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=STOP_TIMEOUT_S)
    return list(done)


def failure_of(reference: Any) -> str:
    """Why a call that is done failed; empty when it did not."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return first_line(error.cause or error)
    except ray.exceptions.RayError as error:
        if "creation task" in first_line(error):
            return _last_line(error)  # below the traceback stands what its constructor raised
        return f"its process has died: {first_line(error)}"
    return ""


def has_died(reference: Any) -> bool:
    """Whether the actor of a call that is done is gone for good."""
    try:
        ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
        return False  # for now
    except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError):
        return True
    except ray.exceptions.RayError:
        return False
    return False


def end_of(reference: Any) -> str:
    """How a run() that is done has ended."""
    return failure_of(reference) or str(ray.get(reference) or "it was told to stop")


def silent(_progress: Progress) -> None:
    """A Report for phases too short to show."""


def first_line(error: BaseException) -> str:
    """What an error says first; its type where it says nothing."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]
