"""Recorded planning cases of vLLM, planned again here and compared field by field.

A case is a list of layers and a memory size with the groups, regions and counts that the peer made of them, or the
kind of error that it raised (its wording is its own). Reads documents, never files; changes no plan to fit a case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from blockferry.engine.errors import PoolTooSmall, UnplannableLayers
from blockferry.engine.kv.plan import KVCachePlan, PageRegion, PlanRequest
from blockferry.engine.kv.planning import plan_unified, plan_uniform
from blockferry.engine.kv.reach import (
    ChunkReach,
    FullReach,
    KVContent,
    LatentContent,
    SequenceLimits,
    SpecKind,
    WindowReach,
)
from blockferry.engine.kv.replay_report import CaseOutcome, ReplayReport, summarize
from blockferry.engine.kv.replay_rules import located
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, LayerSpec, MambaMode, MambaSpec

Case = Mapping[str, Any]
"""One case of the recording, as JSON gives it."""

ONE_LEVEL = "planning cases know one level only, contract; --level changes nothing for them"

_ERRORS = {"error", "size_error"}
_TYPE_NAMES = {
    SpecKind.FULL_ATTENTION: "full",
    SpecKind.SLIDING_WINDOW: "swa",
    SpecKind.CHUNKED_LOCAL: "chunked",
    SpecKind.MLA: "mla",
    SpecKind.MAMBA: "mamba",
}
_DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8": 1, "fp8": 1}


def replay_planning(document: Mapping[str, Any], *, file: str = "") -> ReplayReport:
    """Plan every case of a recording; `file` is only its name in the report.

    The document must be one that replay_planning_checks.check_cases passes. Raises ValueError, with the case's id, for
    what the planner itself refuses.
    """
    outcomes = (CaseOutcome(family=family_of(case), mismatch=replay_case(case)) for case in document["cases"])
    return summarize(outcomes, file=file, level="contract", note=ONE_LEVEL)


def family_of(case: Case) -> str:
    """Name of the case without its number: "12:full+mamba" is of "full+mamba"."""
    return str(case["id"]).partition(":")[2]


def replay_case(case: Case) -> str | None:
    """The first field in which our plan differs from the recorded one, in full; None where none does."""
    wanted: dict[str, Any] = dict(case["out"])
    with located(f"case {case['id']}"):
        got = _plan_again(case)
    for error in _ERRORS:
        if (error in wanted) != (error in got):
            return f"{case['id']}: {error} is {got.get(error)}, recorded {wanted.get(error)}"
    for field, value in wanted.items():
        if field not in _ERRORS and got[field] != value:
            return f"{case['id']}: {field} is {got[field]}, recorded {value}"
    return None


def request_of(case: Case) -> PlanRequest:
    """What the case asks a planner."""
    return PlanRequest(
        layers=tuple(_layer_spec(layer) for layer in case["layers"]),
        limits=SequenceLimits(max_model_len=case["max_model_len"], max_in_flight_tokens=case["max_in_flight_tokens"]),
        memory_bytes=case["memory"],
        layout=case["layout"],
    )


def _plan_again(case: Case) -> dict[str, Any]:
    """Our plan's fields under the recording's names; of a pool too small, those that do not depend on its size."""
    request = request_of(case)
    plan = plan_unified if case["disable_hybrid"] else plan_uniform
    try:
        return _plan_fields(plan(request), case)
    except UnplannableLayers as error:
        return {"error": str(error)}
    except PoolTooSmall as error:
        roomy = dataclasses.replace(request, memory_bytes=error.needed_bytes)
        return {"size_error": str(error)} | _plan_fields(plan(roomy), case)


def _layer_spec(layer: Case) -> LayerSpec:
    maker = _SPEC_MAKERS.get(layer["type"])
    if maker is None:
        raise ValueError(f"layer type {layer['type']!r} is unknown; use one of {', '.join(_SPEC_MAKERS)}")
    return maker(layer)


def _dtype_bytes(name: str) -> int:
    if name not in _DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is unknown; use one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _kv_content(layer: Case) -> KVContent:
    return KVContent(
        num_kv_heads=layer["kv_heads"], head_dim=layer["head_size"], dtype_bytes=_dtype_bytes(layer["dtype"])
    )


def _full(layer: Case) -> LayerSpec:
    return AttentionSpec(block_size=layer["block_size"], content=_kv_content(layer))


def _sliding(layer: Case) -> LayerSpec:
    reach = WindowReach(window=layer["window"])
    return AttentionSpec(block_size=layer["block_size"], content=_kv_content(layer), reach=reach)


def _chunked(layer: Case) -> LayerSpec:
    reach = ChunkReach(chunk=layer["chunk"])
    return AttentionSpec(block_size=layer["block_size"], content=_kv_content(layer), reach=reach)


def _latent(layer: Case) -> LayerSpec:
    content = LatentContent(latent_dim=layer["head_size"], dtype_bytes=_dtype_bytes(layer["dtype"]))
    return AttentionSpec(block_size=layer["block_size"], content=content)


def _mamba(layer: Case) -> LayerSpec:
    return MambaSpec(
        block_size=layer["block_size"],
        shapes=tuple(tuple(shape) for shape in layer["shapes"]),
        dtype_bytes=tuple(_dtype_bytes(dtype) for dtype in layer["dtypes"]),
        mode=MambaMode(layer["mode"]),
    )


_SPEC_MAKERS: Mapping[str, Callable[[Case], LayerSpec]] = {
    "full": _full,
    "swa": _sliding,
    "chunked": _chunked,
    "mla": _latent,
    "mamba": _mamba,
}


def _plan_fields(plan: KVCachePlan, case: Case) -> dict[str, Any]:
    recorded = case["out"].get("groups", [])
    return {
        "groups": [
            _group_in_shape_of(recorded[i]["spec"] if i < len(recorded) else {}, group)
            for i, group in enumerate(plan.groups)
        ],
        "bytes_per_block": plan.bytes_per_block,
        "useful_fraction": round(plan.useful_fraction, 4),
        "num_blocks": plan.num_blocks,
        "tensors": [_tensor(region, plan.pool_bytes) for region in plan.regions],
        "sched_hash_block_size": [plan.scheduler_block_size, plan.hash_block_size],
        "capacity_tokens": plan.capacity_tokens,
        "max_concurrency": round(plan.max_concurrency, 6),
    }


def _tensor(region: PageRegion, pool_bytes: int) -> dict[str, Any]:
    return {
        "layers": [f"l{layer_id}" for layer_id in region.layer_ids],
        "size": pool_bytes,
        "offset": region.offset,
        "layer_stride": region.layer_stride,
        "block_stride": region.block_stride,
    }


def _group_in_shape_of(recorded_spec: Case, group: KVCacheGroup) -> dict[str, Any]:
    """Our group as the recording writes one: with a spec that all layers share, or with one of each layer."""
    layers = [f"l{layer_id}" for layer_id in group.layer_ids]
    specs = group.layer_specs
    spec: dict[str, Any] = {"block_size": group.spec.block_size}
    if "uniform" in recorded_spec:
        each = [[_TYPE_NAMES[one.kind], one.block_size, one.page_size_bytes] for one in specs]
        spec |= {"uniform": dict(zip(layers, each, strict=True)), "page": sum(one.page_size_bytes for one in specs)}
    else:
        spec |= {"type": _TYPE_NAMES[group.spec.kind], "page": group.spec.page_size_bytes} | _details(specs[0])
    return {"layers": layers, "spec": spec}


def _details(spec: LayerSpec) -> dict[str, int]:
    """What the recording names besides, where there is any: padded page bytes, windows and chunks."""
    is_padded = spec.page_size_bytes != spec.unpadded_page_size_bytes
    padded = {"padded": spec.page_size_bytes} if is_padded else {}
    return padded | (_reach_details(spec) if isinstance(spec, AttentionSpec) else {})


def _reach_details(spec: AttentionSpec) -> dict[str, int]:
    spans: dict[str, int | None] = {}
    match spec.reach:
        case WindowReach(window=window):
            spans = {"window": window}
        case ChunkReach(chunk=chunk):
            spans = {"chunk": chunk}
        case FullReach(computes_window=window, computes_chunk=chunk):
            spans = {"as_window": window, "as_chunk": chunk}
    return {name: span for name, span in spans.items() if span is not None}
