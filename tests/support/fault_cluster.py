"""A real deployment to break: two prefill and two decode instances, their processes, what is left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from support.cluster import LiveDeployment, live_deployment, request
from support.fault_load import Load, Outcome, fault_free, run_load
from support.shared_memory import no_segments_left
from support.tiny_families import FAMILIES, VOCAB_SIZE, TinyFamily, build, make_prompt
from support.tiny_tokenizers import save_characters
from transformers import LlamaConfig, PreTrainedConfig

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.request import FinishReason, SamplingParams

SILENCE_LIMIT_S = 6.0
LEASE_S = 6.0
TRANSFER_TIMEOUT_S = 2.0
QUIESCE_TIMEOUT_S = 2.0  # TransferLimits.quiesce_timeout_s
KILL_S = 6.0  # Ray takes 5 s to kill a process that does not answer
HOLD_S = max(SILENCE_LIMIT_S, LEASE_S) + TRANSFER_TIMEOUT_S  # of blocks in which bytes may still land
# a request meets at most one failed instance after one failed transfer; the rest is patience with a busy machine
LIMIT_S = SILENCE_LIMIT_S + KILL_S + LEASE_S + TRANSFER_TIMEOUT_S + 40.0
MAX_TOKENS = 16
CONCURRENCY = 8


def _wide_llama() -> PreTrainedConfig:
    """12 KiB of keys and values a token, so that transfers take long enough to be hit."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
    )


WIDE = TinyFamily(name="wide_llama", architecture="LlamaForCausalLM", make_config=_wide_llama)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is served, and how its blocks travel."""

    family: TinyFamily
    num_prompt_tokens: tuple[int, ...]
    connector: str = "mode: push"  # further lines of the YAML section, in flow style

    def yaml(self, path: Path) -> str:
        length = 2048 if self.family is WIDE else 512
        return f"""
model: {{path: {path}, dtype: float32, max_model_len: {length}}}
cache: {{memory: 128MiB, enable_prefix_caching: false}}
scheduler: {{max_num_seqs: 8, max_num_batched_tokens: 256}}
instances: [{{role: prefill, replicas: 2}}, {{role: decode, replicas: 2}}]
connector:
  {{{self.connector}, lease_s: {LEASE_S}, transfer_timeout_s: {TRANSFER_TIMEOUT_S}}}
health: {{silence_limit_s: {SILENCE_LIMIT_S}, resume_timeout_s: 3}}
api: {{port: 0}}
"""


# buffers so small that a prompt's blocks take long enough to be hit
TCP_ONLY = 'ucx_options: {TLS: "tcp,self", TCP_SNDBUF: "64K", TCP_RCVBUF: "64K"}'
SETTINGS = {
    "dense over tcp": Setting(family=WIDE, num_prompt_tokens=(900, 700, 40, 300), connector=f"mode: push, {TCP_ONLY}"),
    "dense in shared memory": Setting(family=WIDE, num_prompt_tokens=(900, 700, 40, 300)),
    "states over tcp": Setting(
        family=FAMILIES["qwen3_next"], num_prompt_tokens=(200, 150, 20, 90), connector=f"mode: push, {TCP_ONLY}"
    ),
    "windows over tcp, read": Setting(
        family=FAMILIES["gemma3_text"], num_prompt_tokens=(200, 150, 20, 90), connector=f"mode: pull, {TCP_ONLY}"
    ),
}


@dataclasses.dataclass(kw_only=True)
class Broken:
    """The deployment under faults. Every rank is the one rank of its instance."""

    live: LiveDeployment
    prompts: list[list[int]]
    expected: list[str]
    pids: dict[str, int]  # by instance
    _seed: int = 0

    # what is asked of it

    def load(self, num_requests: int, **changes: Any) -> Load:
        self._seed += 1
        values: dict[str, Any] = {
            "url": self.live.running.url,
            "prompts": self.prompts,
            "expected": self.expected,
            "num_requests": num_requests,
            "concurrency": CONCURRENCY,
            "max_tokens": MAX_TOKENS,
            "limit_s": LIMIT_S,
            "seed": self._seed,
        }
        return Load(**(values | changes))

    @contextlib.contextmanager
    def under(self, load: Load) -> Iterator[Outcome]:
        """Run a load beside the body; its outcome is filled in afterwards."""
        outcome = Outcome()
        found: list[Outcome] = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(run_load(load))), name="load")
        thread.start()
        try:
            yield outcome
        finally:
            thread.join(LIMIT_S * 3)
            assert found, "the load does not end"
            for field in dataclasses.fields(Outcome):
                setattr(outcome, field.name, getattr(found[0], field.name))

    # faults

    def alive(self, role: str) -> list[str]:
        return alive_in(self.live.status(), role)

    def kill(self, instance_id: str) -> None:
        os.kill(self.pids[instance_id], signal.SIGKILL)

    def freeze(self, instance_id: str) -> None:
        os.kill(self.pids[instance_id], signal.SIGSTOP)

    def thaw(self, instance_id: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was given up, and killed
            os.kill(self.pids[instance_id], signal.SIGCONT)

    def wait_for_transfers(self) -> None:
        """Until one is seen under way, or two seconds: in shared memory they are rarely seen."""
        deadline_s = time.monotonic() + 2.0
        self.until(lambda status: status["handoffs"]["ferrying"] > 0 or time.monotonic() > deadline_s)

    def until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float = 60.0) -> dict[str, Any]:
        async def use(client: ZmqEngineClient) -> dict[str, Any]:
            deadline_s = time.monotonic() + limit_s
            while not holds(status := await client.status()):
                assert time.monotonic() < deadline_s, f"not within {limit_s} s: {status}"
                await asyncio.sleep(0.01)
            return status

        return self.live.ask(use)

    # what must hold at the end

    def settle(self) -> dict[str, Any]:
        """Wait until every block of every surviving instance is free and the ledgers were audited once more."""
        before = self.live.status()
        # where nobody can be given new work, the last audit was after the last of it
        num_audits = before["num_audits"] if before["is_serving"] else before["num_audits"] - 1

        def is_at_rest(status: dict[str, Any]) -> bool:
            alive = [one for one in status["instances"] if one["state"] == "serving"]
            is_free = all(one["num_free_blocks"] == one["num_blocks"] and not one["num_running"] for one in alive)
            has_none = not status["num_unfinished"] and not any(status["handoffs"].values())
            return is_free and has_none and status["num_audits"] > num_audits

        # an audit comes only after new work: one request more
        self._nudge()
        return self.until(is_at_rest, limit_s=LEASE_S + KILL_S + HOLD_S + 30.0)

    def _nudge(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1)

        async def use(client: ZmqEngineClient) -> None:
            with contextlib.suppress(Exception):
                async for _ in client.submit(request(client, self.prompts[2], sampling)):
                    pass

        self.live.ask(use)

    def abort_at_random(self, moments_s: Sequence[float]) -> list[FinishReason | None]:
        """Requests that are aborted through the engine's client, each after its moment."""
        sampling = SamplingParams(temperature=0.0, max_tokens=60)

        async def one(client: ZmqEngineClient, number: int, moment_s: float) -> FinishReason | None:
            asked = request(client, self.prompts[number % len(self.prompts)], sampling)
            asyncio.get_running_loop().call_later(moment_s, lambda: asyncio.ensure_future(client.abort(asked.handle)))
            outputs = [output async for output in client.submit(asked)]
            return outputs[-1].finish_reason

        async def use(client: ZmqEngineClient) -> list[FinishReason | None]:
            return await asyncio.gather(*(one(client, number, moment) for number, moment in enumerate(moments_s)))

        return self.live.ask(use)


def alive_in(status: dict[str, Any], role: str) -> list[str]:
    """Instances of a role that have not failed."""
    return [one["instance_id"] for one in status["instances"] if one["role"] == role and one["state"] == "serving"]


@contextlib.contextmanager
def broken_deployment(setting: Setting, folder: Path) -> Iterator[Broken]:
    """Bring a setting up, know its answers, and see that nothing is left of it afterwards."""
    path = build(setting.family, folder)
    save_characters(path, VOCAB_SIZE)
    prompts = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate(setting.num_prompt_tokens * 4)]
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with no_segments_left():
        with live_deployment(setting.yaml(path), folder, with_api=True) as live:
            workers = live.running.workers
            pids = {instance_id: ray.get(ranks[0].place.remote()).pid for instance_id, ranks in workers.items()}
            expected = fault_free(live.running.url, prompts, MAX_TOKENS)
            yield Broken(live=live, prompts=prompts, expected=expected, pids=pids)
        left = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
        assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
        assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
