"""Every attention backend gives tokens that are verified together what a decode step each would have given them.

Steps come from build_inputs: a decode row, two rows that verify drafts across a block's border, and a prompt's chunk.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.paged import DEVICE

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.fp8 import ScaledAttention, ScaledLatentAttention
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.attention.reference import ReferenceAttention
from blockferry.engine.attention.triton import TritonAttention
from blockferry.engine.attention.triton_latent import TritonLatentAttention
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.inputs import GroupTable, StepInputs, build_inputs
from blockferry.kernels.fp8 import FP8, CacheScales

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 16, 24, 4, 2, 64
LATENT_DIM, VALUE_DIM = 96, 64
COMPUTED = np.array([20, 14, 40, 5], np.int32)
DRAFTS = np.array([0, 3, 2, 0], np.int32)
SCHEDULED = np.array([1, 4, 3, 9], np.int32)
NUM_TOKENS = int(SCHEDULED.sum())
SCALES = CacheScales(k_K=torch.tensor([0.03, 0.5]), v_K=torch.tensor([0.011, 0.25]))
LATENT_SCALES = CacheScales(k_K=torch.tensor([0.03]), v_K=torch.tensor([0.03]))
RULES = {
    "full": AttentionRule(scale=0.125),
    "window": AttentionRule(scale=0.125, window=9),
    "chunk": AttentionRule(scale=0.125, chunk=16),
}


class Steps:
    """Rows with blocks, and the inputs of any step over them."""

    def __init__(self) -> None:
        self._rows = RowTable(max_rows=4, max_model_len=64)
        self._rows.token_ids[:] = 0
        table = BlockTable(max_rows=4, max_blocks=4)
        block_ids = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS))[:16].astype(np.int32)
        table.set(np.repeat(np.arange(4), 4), np.tile(np.arange(4), 4), block_ids)
        self._groups = [GroupTable(table=table, block_size=BLOCK_SIZE)]

    def inputs(self, computed: np.ndarray, scheduled: np.ndarray, drafts: np.ndarray) -> StepInputs:
        rows = np.flatnonzero(scheduled).astype(np.int32)
        plan = StepPlan(
            step_id=1,
            rows=rows,
            num_computed=computed[rows],
            num_scheduled=scheduled[rows],
            sample=np.ones(len(rows), np.bool_),
            num_drafts=drafts[rows],
            draft_token_ids=np.zeros(int(drafts.sum()), np.int32),
        )
        return build_inputs(plan, self._rows, self._groups, device=torch.device(DEVICE))

    def together(self) -> StepInputs:
        return self.inputs(COMPUTED, SCHEDULED, DRAFTS)

    def one_by_one(self) -> list[StepInputs]:
        """The same tokens with no draft among them: what is verified together comes in steps of one token each."""
        made = []
        for place in range(1 + int(DRAFTS.max())):
            scheduled = np.where(DRAFTS > 0, place < SCHEDULED, SCHEDULED * (place == 0)).astype(np.int32)
            made.append(self.inputs(COMPUTED + place, scheduled, np.zeros_like(DRAFTS)))
        return made


def attention_of(inputs: StepInputs) -> AttentionMetadata:
    (metadata,) = inputs.metadata
    assert metadata.attention is not None
    return metadata.attention


def chosen_tokens(together: StepInputs, step: StepInputs) -> torch.Tensor:
    """Where the tokens of a step stand in the whole one: the slots that they write say who they are."""
    slots_T = attention_of(together).slot_mapping_T
    return torch.stack([(slots_T == slot).nonzero()[0, 0] for slot in attention_of(step).slot_mapping_T])


def check(forward, pages: torch.Tensor, *, tolerance: float = 0.0) -> None:
    """forward(tokens, pages, metadata) attends the tokens of a step, given by their places in the whole one."""
    steps, other_pages = Steps(), pages.clone()
    together = steps.together()

    out = forward(torch.arange(NUM_TOKENS, device=DEVICE), pages, attention_of(together))

    for step in steps.one_by_one():
        tokens = chosen_tokens(together, step)
        expected = forward(tokens, other_pages, attention_of(step))
        torch.testing.assert_close(out[tokens], expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(as_bytes(pages), as_bytes(other_pages))


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    return pages.contiguous().view(torch.uint8)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def pages_without_future(width: int, num_heads: int) -> torch.Tensor:
    """Pages whose slots that the steps write are NaN, so that reading one before it is written shows."""
    pages = random(NUM_BLOCKS, num_heads, BLOCK_SIZE, width, dtype=torch.float32, seed=3)
    slots = attention_of(Steps().together()).slot_mapping_T
    pages[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = math.nan
    return pages


@dataclasses.dataclass(frozen=True)
class Case:
    """A backend, what it stores and how exact it is."""

    backend: object
    dtype: torch.dtype
    scales: CacheScales | None = None
    tolerance: float = 0.0


CASES = {
    "reference": Case(ReferenceAttention(), torch.float32, tolerance=1e-6),
    "cpu float32": Case(CpuAttention(), torch.float32),
    "cpu bfloat16": Case(CpuAttention(), torch.bfloat16),
    "cpu float16": Case(CpuAttention(), torch.float16),
    "cpu fp8": Case(ScaledAttention(CpuAttention()), torch.bfloat16, scales=SCALES),
    "triton": Case(TritonAttention(), torch.float32, tolerance=1e-5),
}
LATENT_CASES = {
    "torch": Case(TorchLatentAttention(), torch.float32, tolerance=1e-6),
    "torch fp8": Case(ScaledLatentAttention(TorchLatentAttention()), torch.float32, LATENT_SCALES, 1e-6),
    "triton": Case(TritonLatentAttention(), torch.float32, tolerance=1e-5),
}


def with_marks(cases: dict[str, Case]) -> list[object]:
    """Interpreted kernels are slow, and carry the marker of their kind."""
    return [
        pytest.param(case, id=name, marks=[pytest.mark.triton] if name == "triton" else [])
        for name, case in cases.items()
    ]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("case", with_marks(CASES))
def test_tokens_that_are_verified_together_attend_as_in_steps_of_one(case: Case, rule: AttentionRule) -> None:
    q, k, v = (
        random(NUM_TOKENS, heads, HEAD_DIM, dtype=case.dtype, seed=seed)
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    rule = dataclasses.replace(rule, scales=case.scales)
    pages = pages_without_future(2 * HEAD_DIM, KV_HEADS).to(FP8 if case.scales else case.dtype)

    def forward(tokens: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return case.backend.forward(q[tokens], k[tokens], v[tokens], kv_cache=kv_cache, metadata=metadata, rule=rule)

    check(forward, pages, tolerance=case.tolerance)


@pytest.mark.parametrize("case", with_marks(LATENT_CASES))
def test_latents_that_are_verified_together_attend_as_in_steps_of_one(case: Case) -> None:
    q = random(NUM_TOKENS, HEADS, LATENT_DIM, dtype=case.dtype, seed=0)
    latent = random(NUM_TOKENS, LATENT_DIM, dtype=case.dtype, seed=1)
    rule = AttentionRule(scale=0.125, scales=case.scales)
    pages = pages_without_future(LATENT_DIM, 1)[:, 0].to(FP8 if case.scales else case.dtype)

    def forward(tokens: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return case.backend.forward(
            q[tokens], latent[tokens], kv_cache=kv_cache, metadata=metadata, rule=rule, value_dim=VALUE_DIM
        )

    check(forward, pages, tolerance=case.tolerance)
