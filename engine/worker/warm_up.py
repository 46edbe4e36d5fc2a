"""The plans a fresh worker executes once, so that no request waits for kernels to be compiled.

They compute one prompt and one decode step on row 0, in blocks that nobody holds yet, and forget the row again.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan
from blockferry.engine.worker.spec import WorkerSpec

MAX_TOKENS = 40  # more than a tile of every kernel
_ROW = np.zeros(1, np.int32)
_SAMPLE = np.ones(1, np.bool_)


def warm_up_plans(spec: WorkerSpec, ledger: KVCacheConfig, max_num_encoder_tokens: int = 0) -> list[StepPlan]:
    """Plans for a pool of the ledger's blocks; none where not even two tokens fit. An encoder reads the same prompt."""
    num_tokens = min(MAX_TOKENS, spec.max_num_batched_tokens, spec.max_model_len - 1)
    if max_num_encoder_tokens:
        num_tokens = min(num_tokens, max_num_encoder_tokens - 1)  # blocks are given for one token more
    while num_tokens and not _fits(ledger, num_tokens + 1):
        num_tokens -= 1
    if num_tokens < 1:
        return []
    prompt = NewRow(
        row=0,
        token_ids=np.ones(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0, seed=0),
        num_encoder_tokens=num_tokens if max_num_encoder_tokens else 0,
        encoder_token_ids=np.ones(num_tokens, np.int32) if max_num_encoder_tokens else None,
    )
    return [
        StepPlan(
            step_id=-3,
            new_rows=(prompt,),
            deltas=first_blocks(ledger, num_tokens + 1),
            rows=_ROW,
            num_computed=np.zeros(1, np.int32),
            num_scheduled=np.array([num_tokens], np.int32),
            sample=_SAMPLE,
        ),
        StepPlan(
            step_id=-2,
            rows=_ROW,
            num_computed=np.array([num_tokens], np.int32),
            num_scheduled=np.ones(1, np.int32),
            sample=_SAMPLE,
        ),
        StepPlan(step_id=-1, freed_rows=_ROW),
    ]


def _fits(ledger: KVCacheConfig, num_tokens: int) -> bool:
    counts = [group.spec.num_blocks_for(num_tokens) for group in ledger.groups]
    if ledger.slab is None:
        return sum(counts) < ledger.num_blocks
    return all(count <= ledger.slab.num_pages(group) for group, count in enumerate(counts))


def first_blocks(ledger: KVCacheConfig, num_tokens: int) -> BlockDeltas:
    """Row 0's first columns. In slabs, groups number pages of their own, which may lie in the same bytes."""
    counts = [group.spec.num_blocks_for(num_tokens) for group in ledger.groups]
    columns = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return BlockDeltas(
        group=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        row=np.zeros(len(columns), np.int32),
        column=columns,
        block_id=columns + 1 if ledger.slab is not None else np.arange(1, len(columns) + 1, dtype=np.int32),
    )
