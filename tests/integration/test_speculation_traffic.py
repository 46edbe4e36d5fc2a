"""Requests that come while others run, with shared prefixes, stop tokens and random draws, answer as without drafts."""

import dataclasses
import random
from pathlib import Path

import pytest
from support.known_drafts import KnownDrafts
from support.local_engine import INSTANCE, EngineOptions, LocalEngine, make_request, start_worker
from support.parity_cases import smallest_pool
from support.speculation_cases import ngram
from support.tiny_families import FAMILIES, build, make_prompt

from blockferry.engine.request import Request
from blockferry.engine.scheduler.outputs import Route, StepOutput
from blockferry.engine.wire import pack, plan_from_bytes
from blockferry.engine.worker.worker import Worker

pytestmark = pytest.mark.slow
NAMES = ("llama", "gemma3_text", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "jamba", "lfm2")
NUM_REQUESTS = 14


def make_requests(rng: random.Random) -> list[Request]:
    """Of any length and way to draw; four in ten begin as an earlier one does."""
    made: list[Request] = []
    for handle in range(1, NUM_REQUESTS + 1):
        prompt = make_prompt(rng.randrange(10**6), rng.randrange(2, 70))
        if made and rng.random() < 0.4:
            other = rng.choice(made).prompt_token_ids.tolist()
            prompt = [*other[: rng.randrange(1, len(other) + 1)], *prompt[:20]][:90]
        request = make_request(handle, prompt, rng.randrange(1, 36))
        sampling = dataclasses.replace(
            request.sampling,
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=handle,
            top_k=rng.choice([0, 30]),
            stop_token_ids=tuple(rng.sample(range(3, 190), rng.choice([0, 0, 12]))),
        )
        made.append(dataclasses.replace(request, sampling=sampling))
    return made


def run(worker: Worker, path: Path, options: EngineOptions, requests: list[Request], seed: int) -> list[list[int]]:
    """One request after the other arrives, at random; the ledger is audited after every step."""
    engine, rng = LocalEngine(path, options, worker), random.Random(seed)
    outputs: dict[int, list[int]] = {request.handle: [] for request in requests}
    waiting, pending = list(requests), set(outputs)
    while pending:
        if waiting and (rng.random() < 0.3 or len(waiting) == len(pending)):
            engine.central.add(waiting.pop(0), Route(prefill=INSTANCE, decode=INSTANCE))
        plan = engine.central.plan(INSTANCE)
        output = StepOutput()
        if plan is not None:
            result = worker.execute(plan_from_bytes(pack(plan)))
            assert result is not None
            output = engine.central.commit(INSTANCE, result)
        engine.central.check_integrity()
        for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            outputs[handle].append(token_id)
        pending -= {finished.handle for finished in output.finished}
    assert engine.kv.stats().num_free_blocks == engine.kv.stats().num_blocks
    return list(outputs.values())


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 3 else [pytest.mark.full]) for seed in range(60)]
)
def test_traffic_is_answered_as_without_drafts(seed: int, families_folder: Path) -> None:
    rng = random.Random(seed)
    path = build(FAMILIES[NAMES[seed % len(NAMES)]], families_folder)
    chunk = rng.choice([17, 48, 128])
    plain = EngineOptions(max_model_len=128, max_num_batched_tokens=chunk, enable_caching=rng.random() < 0.7)
    requests = make_requests(rng)
    expected = run(start_worker(path, plain), path, plain, requests, seed)
    speculation = ngram(rng.choice([1, 2, 3, 5]), is_adaptive=rng.random() < 0.5)
    drafting = dataclasses.replace(plain, speculation=speculation)
    if rng.random() < 0.6:
        least = smallest_pool(drafting, path)
        drafting = dataclasses.replace(least, memory_bytes=least.memory_bytes * rng.choice([100, 130, 170]) // 100)
    sequences = [[*one.prompt_token_ids.tolist(), *more] for one, more in zip(requests, expected, strict=True)]
    drafts = KnownDrafts(sequences, [rng.random() < 0.75 for _ in range(7)])

    assert run(start_worker(path, drafting, make_proposer=drafts.of), path, drafting, requests, seed + 1) == expected
