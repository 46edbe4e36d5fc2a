"""Scales of a cache in fp8 for checkpoints that bring none: one fixed prompt, the largest magnitudes, powers of two.

    scale = 2 ** ceil(log2(largest |k| or |v| of the head * HEADROOM / 448))

Owns the prompt and the rule. A power of two multiplies exactly in every float type, and hides most of what differs in
the last bits between machines. The same checkpoint gives the same scales on every instance of one tensor parallelism:
the prompt and its chunks are fixed, and no row's result depends on a batch; instances of several agree when they
connect (handshake.with_common_scales). e4m3 keeps its precision down to 2 ** -6 of
a unit, so that headroom costs next to nothing; what is larger still is clamped.

Legend: T tokens of the step, H query heads, K kv heads, D head dim; latent names as in LatentBackend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule, LatentBackend
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.models.config import ModelHeader
from blockferry.engine.models.draft_head import num_drafting_layers
from blockferry.engine.request import Int32Array, SamplingParams
from blockferry.engine.wire import NO_DELTAS, NewRow, StepPlan
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.warm_up import first_blocks, first_counts
from blockferry.kernels.fp8 import FP8_MAX, CacheScales

NUM_TOKENS = 256
CHUNK = 64  # tokens of a step; fewer only where an instance's budget is smaller
HEADROOM = 2.0  # other prompts reach further than this one
_ROW = np.zeros(1, np.int32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def calibration_plan(spec: WorkerSpec, header: ModelHeader) -> InstancePlan:
    """A small pool in the model's own dtype with the same layers, groups of any shape. Raises ConfigError."""
    num_tokens = _num_tokens(spec)
    request = InstanceRequest(
        dtype=spec.dtype.value,
        max_model_len=num_tokens + 1,
        max_in_flight_tokens=num_tokens,
        memory_bytes=0,
        num_blocks=num_tokens + 2,
        layout=spec.layout,
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        num_speculative_tokens=0 if spec.speculation is None else spec.speculation.num_tokens,
        num_draft_layers=num_drafting_layers(header, spec.speculation),
    )
    counts = first_counts(plan_instance(header.values, request).ledger, num_tokens + 1)
    return plan_instance(header.values, dataclasses.replace(request, num_blocks=1 + sum(counts)))


def calibration_steps(spec: WorkerSpec, plan: InstancePlan, header: ModelHeader) -> Iterator[StepPlan]:
    """The fixed prompt in chunks, on row 0, which is forgotten again. Nothing is sampled."""
    token_ids = prompt_ids(header, _num_tokens(spec))
    prompt = NewRow(
        row=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    chunk = min(CHUNK, spec.max_num_batched_tokens)
    for start in range(0, len(token_ids), chunk):
        is_first = not start
        yield StepPlan(
            step_id=-4,
            new_rows=(prompt,) if is_first else (),
            deltas=first_blocks(plan.ledger, len(token_ids) + 1) if is_first else NO_DELTAS,
            rows=_ROW,
            num_computed=np.array([start], np.int32),
            num_scheduled=np.array([min(chunk, len(token_ids) - start)], np.int32),
            sample=np.zeros(1, np.bool_),
        )
    yield StepPlan(step_id=-4, freed_rows=_ROW)


def prompt_ids(header: ModelHeader, num_tokens: int) -> Int32Array:
    """The prompt: the begin token, whose keys are the largest in many models, then a fixed draw of all tokens."""
    numbers = np.arange(num_tokens, dtype=np.uint64) * _GOLDEN  # wraps around
    token_ids = ((numbers >> np.uint64(33)) % np.uint64(header.vocab_size)).astype(np.int32)
    begin = header.values.get("bos_token_id")
    token_ids[0] = begin if isinstance(begin, int) and 0 <= begin < header.vocab_size else 0
    return token_ids


def no_magnitudes(plan: InstancePlan, views: Mapping[int, tuple[torch.Tensor, ...]]) -> dict[int, CacheScales]:
    """Per layer id that attends, zeros to be raised by the backends below, one per head of its view."""
    seen = {}
    for layer_id, tensors in views.items():
        if isinstance(plan.model.layers[layer_id], AttentionSpec):
            pages = tensors[0]
            k_K = torch.zeros(pages.shape[1] if pages.dim() == 4 else 1, device=pages.device)
            seen[layer_id] = CacheScales(k_K=k_K, v_K=torch.zeros_like(k_K) if pages.dim() == 4 else k_K)
    return seen


def scales_of(magnitudes: Mapping[int, CacheScales]) -> dict[int, CacheScales]:
    """Scales per layer id. Raises ModelLoadError where the model computed infinities or NaN."""
    return {
        layer_id: CacheScales(k_K=_scale_of(seen.k_K, layer_id), v_K=_scale_of(seen.v_K, layer_id))
        for layer_id, seen in magnitudes.items()
    }


class ObservedAttention(AttentionBackend):
    """Raises the magnitudes that it finds in the rule's scales to those of the step, then attends without scales."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        seen, tokens = rule.scales, slice(metadata.num_tokens)
        assert seen is not None, "a layer without magnitudes"
        for seen_K, x_TKD in ((seen.k_K, k_TKD), (seen.v_K, v_TKD)):
            torch.maximum(seen_K, x_TKD[tokens].abs().amax(dim=(0, 2)).float(), out=seen_K)
        rule = dataclasses.replace(rule, scales=None)
        return self._inner.forward(q_THD, k_TKD, v_TKD, kv_cache=kv_cache, metadata=metadata, rule=rule)


class ObservedLatentAttention(LatentBackend):
    """The same for latents."""

    def __init__(self, inner: LatentBackend) -> None:
        self._inner = inner

    def forward(
        self,
        q_THR: torch.Tensor,
        latent_TR: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
        value_dim: int,
    ) -> torch.Tensor:
        """See LatentBackend."""
        seen = rule.scales
        assert seen is not None, "a layer without magnitudes"
        torch.maximum(seen.k_K, latent_TR[: metadata.num_tokens].abs().amax().float(), out=seen.k_K)
        rule = dataclasses.replace(rule, scales=None)
        return self._inner.forward(
            q_THR, latent_TR, kv_cache=kv_cache, metadata=metadata, rule=rule, value_dim=value_dim
        )


def _num_tokens(spec: WorkerSpec) -> int:
    return max(1, min(NUM_TOKENS, spec.max_model_len - 1))


def _scale_of(magnitude_K: torch.Tensor, layer_id: int) -> torch.Tensor:
    """The smallest powers of two that leave headroom; 1 for a head that is zero."""
    if not bool(magnitude_K.isfinite().all()):
        raise ModelLoadError(
            f"cache layer {layer_id} computes keys or values that are not finite, its cache cannot be fp8; "
            "use cache.dtype auto, or model.dtype float32"
        )
    mantissa_K, exponent_K = torch.frexp(magnitude_K * (HEADROOM / FP8_MAX))
    exponent_K = torch.where(mantissa_K == 0.5, exponent_K - 1, exponent_K).clamp(-100, 100)
    return torch.where(magnitude_K > 0, torch.ldexp(torch.ones_like(magnitude_K), exponent_K), 1.0)
