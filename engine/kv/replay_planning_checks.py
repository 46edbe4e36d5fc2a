"""What a recorded planning case may hold, checked before it is planned again.

Plans nothing. Every refusal is a ValueError that names the case. The fields are those of the recording's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockferry.engine.kv.replay_rules import (
    MAX_INT32,
    Rule,
    anything,
    check_fields,
    check_recording,
    flag,
    integer,
    list_of,
    located,
    name_of,
    number,
    one_of,
    text,
)

MAX_MEMORY_BYTES = 1 << 50
MAX_LAYER_SIZE = 1 << 20  # block_size, kv_heads, head_size and every length of a state's shape

_COUNT = integer(1, MAX_INT32)
_SIZE = integer(1, MAX_LAYER_SIZE)
_DTYPE = one_of(("f32", "f16", "bf16", "f8", "fp8"))
_CASE: Mapping[str, Rule] = {
    "id": text,
    "layers": list_of(anything, at_least=1),
    "disable_hybrid": flag,
    "max_model_len": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "max_in_flight_tokens": _COUNT,
    "memory": integer(0, MAX_MEMORY_BYTES),
    "layout": one_of(("LBHNC", "BLHNC")),
    "out": anything,
}
_ATTENTION: Mapping[str, Rule] = {"kv_heads": _SIZE, "head_size": _SIZE, "dtype": _DTYPE}
_LAYER_FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "full": _ATTENTION,
    "swa": {**_ATTENTION, "window": _COUNT},
    "chunked": {**_ATTENTION, "chunk": _COUNT},
    "mla": _ATTENTION,
    "mamba": {
        "shapes": list_of(list_of(_SIZE, at_least=1), at_least=1),
        "dtypes": list_of(_DTYPE, at_least=1),
        "mode": one_of(("align", "none")),
    },
}


def check_cases(document: Mapping[str, Any]) -> None:
    """Check a whole file of planning cases. Raises ValueError for the first thing that no recording may hold."""
    check_recording(document, "cases")
    for index, case in enumerate(document["cases"]):
        with located(name_of("case", index, case)):
            _check_case(case)


def _check_case(case: Mapping[str, Any]) -> None:
    check_fields("the case", case, _CASE)
    for index, layer in enumerate(case["layers"]):
        with located(f"layer {index}"):
            _check_layer(layer)
    _check_out(case["out"])


def _check_layer(layer: Any) -> None:
    kind = layer.get("type") if isinstance(layer, dict) else None
    if isinstance(layer, dict):
        one_of(_LAYER_FIELDS)("type", kind)
    required: dict[str, Rule] = {"type": anything, "block_size": _SIZE} | dict(_LAYER_FIELDS.get(str(kind), {}))
    check_fields("the layer", layer, required)
    if kind == "mamba" and len(layer["shapes"]) != len(layer["dtypes"]):
        raise ValueError(f"dtypes has {len(layer['dtypes'])} entries; shapes has {len(layer['shapes'])}")


def _check_out(out: Any) -> None:
    """A whole plan, or why there was none; of a pool too small, what does not depend on its size."""
    if isinstance(out, dict) and "error" in out:
        check_fields("out", out, {"error": text})
    elif isinstance(out, dict) and "size_error" in out:
        check_fields("out", out, {"size_error": text}, _PLAN)
    else:
        check_fields("out", out, _PLAN)


def _check_groups(name: str, groups: Any) -> None:
    list_of(anything, at_least=1)(name, groups)
    for index, group in enumerate(groups):
        with located(f"{name}[{index}]"):
            check_fields("the group", group, {"layers": list_of(text, at_least=1), "spec": _check_spec})


def _check_spec(name: str, spec: Any) -> None:
    check_fields(name, spec, dict.fromkeys(spec, anything) if isinstance(spec, dict) else {})


_PLAN: Mapping[str, Rule] = {
    "groups": _check_groups,
    "bytes_per_block": number,
    "useful_fraction": number,
    "num_blocks": number,
    "tensors": list_of(anything, at_least=1),
    "sched_hash_block_size": list_of(number),
    "capacity_tokens": number,
    "max_concurrency": number,
}
