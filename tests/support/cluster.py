"""Real deployments for tests: Ray, actors and workers on this machine, asked through the ZeroMQ client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.fetch import is_fetched, model_dir
from blockferry.cluster.running import Running
from blockferry.cluster.session import Wish, deployed
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams

MODEL = "smollm2-135m-instruct"
Result = TypeVar("Result")
_names = itertools.count()


def smollm2_dir() -> Path:
    """The fetched demo checkpoint; `make test` fetches it first."""
    assert is_fetched(MODEL), f"run `blockferry fetch-model {MODEL}` before the tests that are marked `model`"
    return model_dir(MODEL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Everything one request answered."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: RequestStats | None
    outputs: list[RequestOutput]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveDeployment:
    """A running deployment and ways to use it from synchronous tests."""

    running: Running

    def ask(self, use: Callable[[ZmqEngineClient], Awaitable[Result]]) -> Result:
        """Run a coroutine with a connected client."""

        async def run() -> Result:
            timeout_s = self.running.config.health.resume_timeout_s
            client = ZmqEngineClient(self.running.client_endpoint, resume_timeout_s=timeout_s)
            await client.connect()
            try:
                return await use(client)
            finally:
                client.close()

        return asyncio.run(run())

    def complete(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Completion]:
        """Complete all prompts at once."""

        async def run(client: ZmqEngineClient) -> list[Completion]:
            return await asyncio.gather(*(complete(client, prompt, sampling) for prompt in prompts))

        return self.ask(run)

    def status(self) -> dict[str, Any]:
        """The scheduler's own report."""
        return self.ask(lambda client: client.status())


def request(client: ZmqEngineClient, prompt: Sequence[int], sampling: SamplingParams) -> Request:
    """A request with the next free handle."""
    handle = client.next_handle()
    return Request(
        request_id=f"test-{handle}",
        handle=handle,
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=sampling,
        arrival_s=time.monotonic(),
    )


async def complete(client: ZmqEngineClient, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
    """One request to its end."""
    outputs = [output async for output in stream(client, prompt, sampling)]
    return Completion(
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        finish_reason=outputs[-1].finish_reason,
        stats=outputs[-1].stats,
        outputs=outputs,
    )


def stream(client: ZmqEngineClient, prompt: Sequence[int], sampling: SamplingParams) -> AsyncIterator[RequestOutput]:
    """One request's outputs as they come."""
    return client.submit(request(client, prompt, sampling))


def wait_until_idle(live: LiveDeployment) -> dict[str, Any]:
    """The first status after everything ended and the ledgers were audited again."""
    deadline = time.monotonic() + 60
    before = live.status()["num_audits"]
    while time.monotonic() < deadline:
        status = live.status()
        if status["num_unfinished"] == 0 and status["num_audits"] > before:
            return status
        time.sleep(0.3)
    raise AssertionError(f"not idle and audited within 60 s: {status}")


@contextlib.contextmanager
def live_deployment(yaml_text: str, folder: Path, *, with_api: bool = False) -> Iterator[LiveDeployment]:
    """Bring a deployment file up on a local Ray cluster of its own; everything is gone afterwards."""
    file = folder / "deployment.yaml"
    file.write_text(f"name: test-{os.getpid()}-{next(_names)}\n{yaml_text}")
    wish = Wish(deployment=load_deployment(file), file=file, address=None, with_api=with_api)
    with deployed(wish, lambda _progress: None) as running:
        yield LiveDeployment(running=running)
