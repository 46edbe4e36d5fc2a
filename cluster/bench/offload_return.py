"""How long a returning conversation waits for its first token, with and without tiers behind a pool too small for it.

Conversations of random tokens take turns, one request at a time, on two deployments that differ in nothing else: by
the time one comes back with a longer prompt, others have pushed it out of the pool. Talks HTTP only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import numpy as np

from blockferry.cluster.bench.load import Answer, Endpoint, Prompt, ask, find_model
from blockferry.cluster.bench.report import ParamValue, Result
from blockferry.cluster.bench.serve import FIRST_RANDOM_ID
from blockferry.cluster.deployment import Deployment, is_disaggregated
from blockferry.engine.config import OffloadConfig
from blockferry.engine.errors import ConfigError

OFF, ON = "off", "on"
_REQUEST_TIMEOUT_S = 300.0
_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReturnBenchConfig:
    """What to ask."""

    num_conversations: int = 8
    prompt_tokens: int = 1024  # of a conversation's first turn
    turn_tokens: int = 32  # more in each turn
    num_turns: int = 2  # that come back
    num_output_tokens: int = 4
    pool_share: float = 0.25  # of all conversations' tokens that the pool holds
    cpu_gib: float = 1.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a conversation's last turn."""
        return self.prompt_tokens + self.num_turns * self.turn_tokens + self.num_output_tokens

    @property
    def params(self) -> dict[str, ParamValue]:
        """What every result is about."""
        return {
            "conversations": self.num_conversations,
            "prompt_tokens": self.prompt_tokens,
            "pool_share": self.pool_share,
        }

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included; one conversation always fits."""
        num_tokens = max(self.longest, int(self.pool_share * self.num_conversations * self.longest))
        return 2 + -(-num_tokens // _BLOCK_SIZE)


def return_deployments(base: Deployment, config: ReturnBenchConfig) -> dict[str, Deployment]:
    """What to bring up, by whether it offloads. Raises ConfigError."""
    if is_disaggregated(base.config):
        raise ConfigError("--config", f"{base.config.name!r} has prefill and decode instances; give a mixed deployment")
    if config.longest > base.config.model.max_model_len:
        raise ConfigError(
            "--prompt-tokens",
            f"{config.longest} in all exceed max_model_len={base.config.model.max_model_len}; use fewer",
        )
    return {name: _variant(base, config, name) for name in (OFF, ON)}


def _variant(base: Deployment, config: ReturnBenchConfig, name: str) -> Deployment:
    shape = base.config.instances[0]
    cache = dataclasses.replace(shape.cache, num_blocks=config.num_blocks, block_size=_BLOCK_SIZE)
    offload = OffloadConfig(cpu_gib=config.cpu_gib) if name == ON else None
    instance = dataclasses.replace(
        shape, cache=cache, offload=offload, replicas=1, num_threads=1, num_cpus=min(1.0, shape.num_cpus)
    )
    model = dataclasses.replace(base.config.model, max_model_len=config.longest)
    api = dataclasses.replace(base.config.api, host="127.0.0.1", port=0)
    deployment = dataclasses.replace(
        base.config, name=f"bench-offload-{name}-{os.getpid()}", model=model, instances=(instance,), api=api
    )
    return dataclasses.replace(base, config=deployment)


async def run_return_bench(
    config: ReturnBenchConfig, urls: Mapping[str, str], on_step: Callable[[int, int], None] = lambda *_: None
) -> list[Result]:
    """Rows of ttft with and without offload, their ratio per turn, and how many answers are the same.

    Raises ValueError when a request fails.

    urls: of the deployments by name, without /v1. `on_step(number, total)` is called before each conversation's turn.
    """
    draw = np.random.default_rng(config.seed)
    ttft_s: dict[str, list[float]] = {name: [] for name in urls}
    same: list[float] = []
    total = config.num_conversations * (1 + config.num_turns)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as session:
        card = await find_model(session, f"{urls[OFF]}/v1", "")
        first = min(FIRST_RANDOM_ID, card["vocab_size"] // 2)

        def tokens(count: int) -> list[int]:
            drawn: list[int] = draw.integers(first, card["vocab_size"], count).tolist()
            return drawn

        histories = [tokens(config.prompt_tokens) for _ in range(config.num_conversations)]
        for step in range(total):
            on_step(step + 1, total)
            turn, number = divmod(step, config.num_conversations)
            histories[number] += tokens(config.turn_tokens) if turn else []
            prompt = Prompt(token_ids=histories[number], num_output_tokens=config.num_output_tokens)
            texts = set()
            for name in list(urls) if step % 2 else list(urls)[::-1]:
                answer = await ask(session, Endpoint(url=f"{urls[name]}/v1", model=card["id"]), prompt)
                _check(answer, name)
                texts.add(answer.text)
                if turn:
                    ttft_s[name].append(answer.ttft_s)
            same.append(float(len(texts) == 1))
    equal = Result(name="same_answers", params=config.params, unit="1", runs=[sum(same) / len(same)])
    return [*_results(config, ttft_s), equal]


def _check(answer: Answer, name: str) -> None:
    if answer.error:
        raise ValueError(f"a request to the deployment with offload {name} failed: {answer.error}")


def _results(config: ReturnBenchConfig, ttft_s: Mapping[str, Sequence[float]]) -> list[Result]:
    params = config.params
    rows = [
        Result(name="ttft", params={"offload": name, **params}, unit="ms", runs=[one * 1e3 for one in times])
        for name, times in ttft_s.items()
    ]
    pairs = [off / on for off, on in zip(ttft_s[OFF], ttft_s[ON], strict=True)]
    return [*rows, Result(name="ratio", params={"of": "ttft", **params}, unit="1", runs=pairs)]
