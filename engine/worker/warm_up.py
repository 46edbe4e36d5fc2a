"""The plans a fresh worker executes once, so that no request waits for kernels to be compiled.

They compute one prompt, one decode step and, where tokens are drafted, a step that verifies drafts, on row 0, in blocks
that nobody holds yet, and forget the row again.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.spec import KVCacheConfig, KVCacheSpec, MambaSpec
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan
from blockferry.engine.worker.spec import WorkerSpec

MAX_TOKENS = 40  # more than a tile of every kernel
_ROW = np.zeros(1, np.int32)
_SAMPLE = np.ones(1, np.bool_)


def warm_up_plans(spec: WorkerSpec, ledger: KVCacheConfig, max_num_encoder_tokens: int = 0) -> list[StepPlan]:
    """Plans for a pool of the ledger's blocks; none where not even two tokens fit. An encoder reads the same prompt.

    A pool, or a model, that is too small to verify drafts after the smallest prompt is warmed up without them.
    """
    num_drafts = 0 if spec.speculation is None else min(spec.speculation.num_tokens, spec.max_num_batched_tokens - 1)
    for num_behind in (2 + num_drafts, 1) if num_drafts else (1,):  # tokens that are computed behind the prompt
        num_tokens = min(MAX_TOKENS, spec.max_num_batched_tokens, spec.max_model_len - num_behind)
        if max_num_encoder_tokens:
            num_tokens = min(num_tokens, max_num_encoder_tokens - num_behind)  # blocks are given for those too
        while num_tokens > 0 and not _fits(ledger, num_tokens + num_behind):
            num_tokens -= 1
        if num_tokens > 0:
            prompt = _prompt(num_tokens, has_encoder=max_num_encoder_tokens > 0)
            return _plans(prompt, first_blocks(ledger, num_tokens + num_behind), num_drafts=max(0, num_behind - 2))
    return []


def _prompt(num_tokens: int, *, has_encoder: bool) -> NewRow:
    token_ids = np.ones(num_tokens, np.int32)
    return NewRow(
        row=0,
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0, seed=0),
        num_encoder_tokens=num_tokens if has_encoder else 0,
        encoder_token_ids=token_ids if has_encoder else None,
    )


def _plans(prompt: NewRow, blocks: BlockDeltas, *, num_drafts: int) -> list[StepPlan]:
    num_tokens = prompt.num_prompt_tokens
    first = StepPlan(
        step_id=-4,
        new_rows=(prompt,),
        deltas=blocks,
        rows=_ROW,
        num_computed=np.zeros(1, np.int32),
        num_scheduled=np.array([num_tokens], np.int32),
        sample=_SAMPLE,
        num_proposals=num_drafts,
    )
    decode = StepPlan(
        step_id=-3,
        rows=_ROW,
        num_computed=np.array([num_tokens], np.int32),
        num_scheduled=np.ones(1, np.int32),
        sample=_SAMPLE,
        num_proposals=num_drafts,
    )
    verify = StepPlan(
        step_id=-2,
        rows=_ROW,
        num_computed=np.array([num_tokens + 1], np.int32),
        num_scheduled=np.array([1 + num_drafts], np.int32),
        sample=_SAMPLE,
        num_drafts=np.array([num_drafts], np.int32),
        draft_token_ids=np.ones(num_drafts, np.int32),
        num_proposals=num_drafts,
    )
    return [first, decode, *([verify] if num_drafts else []), StepPlan(step_id=-1, freed_rows=_ROW)]


def _fits(ledger: KVCacheConfig, num_tokens: int) -> bool:
    counts = first_counts(ledger, num_tokens)
    if ledger.slab is None:
        return sum(counts) < ledger.num_blocks
    return all(count <= ledger.slab.num_pages(group) for group, count in enumerate(counts))


def _num_columns(spec: KVCacheSpec, num_tokens: int) -> int:
    return spec.num_blocks_for(num_tokens) + (spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0)


def first_counts(ledger: KVCacheConfig, num_tokens: int) -> list[int]:
    """Blocks of each group for one row of so many tokens, those for the states of drafts among them."""
    return [_num_columns(group.spec, num_tokens) for group in ledger.groups]


def first_blocks(ledger: KVCacheConfig, num_tokens: int) -> BlockDeltas:
    """Row 0's first columns. In slabs, groups number pages of their own, which may lie in the same bytes."""
    counts = first_counts(ledger, num_tokens)
    columns = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return BlockDeltas(
        group=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        row=np.zeros(len(columns), np.int32),
        column=columns,
        block_id=columns + 1 if ledger.slab is not None else np.arange(1, len(columns) + 1, dtype=np.int32),
    )
