"""Many short requests while instances die and are replaced: nothing is lost, nothing grows, the ledgers are clean."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from support.fault_load import Load, fault_free
from support.soak import MIB, kill_in_turn, run_beside, settle, watched, write_config
from support.tiny_families import FAMILIES, VOCAB_SIZE, build, make_prompt
from support.tiny_tokenizers import save_characters

from blockferry.cluster.bench.survival_victims import API, SCHEDULER, served

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(3000)]

NUM_PROMPTS = 12
MAX_TOKENS = 8
RECOVERY_S = 120.0
GROWTH_BYTES = 24 * MIB  # between the second and the last quarter of a run


def test_nothing_is_lost_and_nothing_grows_while_instances_die(
    tmp_path: Path, soak_requests: int, soak_interval_s: float
) -> None:
    path = build(FAMILIES["llama"], tmp_path)
    save_characters(path, VOCAB_SIZE)
    prompts = [make_prompt(seed, 20 + 7 * seed) for seed in range(NUM_PROMPTS)]
    name = f"soak-{os.getpid()}"
    with served(write_config(path, tmp_path, name), name, tmp_path / "serve.log") as deployment:
        load = Load(
            url=deployment.url,
            prompts=prompts,
            expected=fault_free(deployment.url, prompts, MAX_TOKENS),
            num_requests=soak_requests,
            concurrency=16,
            max_tokens=MAX_TOKENS,
            limit_s=120.0,
            leaving=0.1,
        )
        disturb = kill_in_turn(deployment, itertools.cycle(["decode", "prefill"]), RECOVERY_S)
        with watched(deployment.pids([SCHEDULER, API])) as memory:
            outcome = run_beside(load, disturb, every_s=soak_interval_s)
        print(outcome, {name: f"{growth / MIB:.1f} MiB" for name, growth in memory.growth_bytes().items()})
        settle(deployment, RECOVERY_S)
    assert outcome.wrong == []
    assert outcome.errors == {}
    assert outcome.num_hung == 0
    assert outcome.num_requests == soak_requests
    assert max(memory.growth_bytes().values()) < GROWTH_BYTES
