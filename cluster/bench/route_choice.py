"""Times what the router costs a request: hashing its prompt, asking every instance, choosing, and adding it. No model.

Two prefill and two decode instances, of which either all hold the prompt or none does; their queues are empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from blockferry.cluster.bench.report import Result
from blockferry.cluster.router import candidate_of, prefix_affinity
from blockferry.connectors.base import TransferMode
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array, Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance

BLOCK_SIZE = 16
VOCAB_SIZE = 49152
ROLES = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
REQUESTS_PER_RUN = 20


def measure(prompt_tokens: Sequence[int] = (1000, 32000), *, num_runs: int = 5) -> list[Result]:
    """One result `route` per prompt length and per whether instances hold the prompt: us per request, best of a run."""
    results = []
    for num_tokens in prompt_tokens:
        for is_held in (False, True):
            params = {"tokens": num_tokens, "held": is_held, "instances": len(ROLES), "block_size": BLOCK_SIZE}
            bench = _Bench(num_tokens)
            if is_held:
                bench.let_all_hold()
            results.append(Result(name="route", params=params, unit="us", runs=[bench.run() for _ in range(num_runs)]))
    return results


class _Bench:
    """Instances, and one prompt that is sent again and again."""

    def __init__(self, num_tokens: int) -> None:
        self._token_ids: Int32Array = np.random.default_rng(0).integers(3, VOCAB_SIZE, num_tokens, np.int32)
        self._instances = [_instance(name, role, num_tokens) for name, role in ROLES.items()]
        connector = PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=1.0)
        self._central = CentralScheduler(self._instances, connector=connector)

    def let_all_hold(self) -> None:
        """As after a request with this prompt has been everywhere."""
        for instance in self._instances:
            kv, row = instance.kv, 0
            instance.rows.assign(row, self._token_ids, num_prompt_tokens=len(self._token_ids))
            kv.start_row(row, kv.hash_prompt(self._token_ids))
            has_room = kv.allocate(row, len(self._token_ids), AllocateOptions())
            assert has_room, instance.instance_id
            kv.free(row)
            instance.rows.clear(row)

    def run(self) -> float:
        """Microseconds of a request, the best of REQUESTS_PER_RUN."""
        return 1e6 * min(self._route_once(handle) for handle in range(REQUESTS_PER_RUN))

    def _route_once(self, handle: int) -> float:
        request = Request(
            request_id=str(handle),
            handle=handle,
            prompt_token_ids=self._token_ids,
            sampling=SamplingParams(max_tokens=8, seed=0),
            arrival_s=0.0,
        )
        central = self._central
        started_s = time.perf_counter()
        newcomer = central.meet(request)
        candidates = [
            candidate_of(central.load(name), instance_id=name, role=role, num_assigned=0)
            for name, role in ROLES.items()
        ]
        route = prefix_affinity(candidates, newcomer)
        assert route is not None, "every role is there"
        central.add(request, route, newcomer)
        elapsed_s = time.perf_counter() - started_s
        central.abort(handle)
        return elapsed_s


def _instance(name: str, role: Role, num_tokens: int) -> Instance:
    max_model_len = num_tokens + 64
    rows = RowTable(max_rows=2, max_model_len=max_model_len)
    spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=3, head_dim=64, dtype_bytes=2))
    config = KVCacheConfig(
        num_blocks=2 * spec.num_blocks_for(max_model_len) + 1,
        groups=(KVCacheGroup(layer_ids=(0,), spec=spec),),
        hash_block_size=BLOCK_SIZE,
    )
    scheduler = SchedulerConfig(max_num_seqs=2)
    return Instance(name, role, config=scheduler, kv=KVCacheManager(config, rows), rows=rows)
