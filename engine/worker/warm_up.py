"""The plans a fresh worker executes once, so that no request waits for kernels to be compiled.

They compute one prompt and one decode step on row 0, in blocks that nobody holds yet, and forget the row again.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan
from blockferry.engine.worker.spec import WorkerSpec

MAX_TOKENS = 40  # more than a tile of every kernel
_ROW = np.zeros(1, np.int32)
_SAMPLE = np.ones(1, np.bool_)


def warm_up_plans(spec: WorkerSpec, *, num_blocks: int) -> list[StepPlan]:
    """Plans for a pool of num_blocks; none where not even two tokens fit."""
    num_slots = (num_blocks - 1) * spec.block_size
    num_tokens = min(MAX_TOKENS, spec.max_num_batched_tokens, spec.max_model_len - 1, num_slots - 1)
    if num_tokens < 1:
        return []
    block_ids = np.arange(1, -(-(num_tokens + 1) // spec.block_size) + 1, dtype=np.int32)
    zeros = np.zeros(len(block_ids), np.int32)
    prompt = NewRow(
        row=0,
        token_ids=np.ones(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    return [
        StepPlan(
            step_id=-3,
            new_rows=(prompt,),
            deltas=BlockDeltas(group=zeros, row=zeros, column=block_ids - 1, block_id=block_ids),
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
