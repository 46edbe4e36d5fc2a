"""What a recorded ledger trace may hold, checked before it is played.

Plays nothing: it follows only what the recording says of itself (who holds blocks, how many tokens are known), so that
a trace that passes can be played to its end or to its first difference. Every refusal is a ValueError that names the
trace and the number of the operation. The fields are those of the recording's format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from blockferry.engine.kv.replay_rules import (
    MAX_INT32,
    Rule,
    anything,
    check_fields,
    check_recording,
    exactly,
    flag,
    fraction,
    integer,
    list_of,
    located,
    name_of,
    null_or,
    one_of,
    shown,
    text,
)

MAX_ROWS = 32
MAX_ENCODER_TOKENS = 4096
MAX_BLOCKS = 1 << 22
MAX_MODEL_LEN = 1 << 20
MAX_BLOCK_SIZE = 1 << 16
MAX_CONTEXT_PARALLEL_SIZE = 1 << 10
MAX_GROUPS = 64

_SIZE = integer(1, MAX_BLOCK_SIZE)
_SPAN = integer(1, MAX_INT32)
_COUNT = integer(0, MAX_INT32)
_CONFIG: Mapping[str, Rule] = {
    "num_blocks": integer(2, MAX_BLOCKS),
    "groups": list_of(anything, at_least=1),
    "scheduler_block_size": integer(1, MAX_INT32),
    "hash_block_size": _SIZE,
    "max_model_len": integer(1, MAX_MODEL_LEN),
    "max_in_flight_tokens": integer(1, MAX_INT32),
    "enable_caching": flag,
    "use_eagle": flag,
    "watermark": fraction,
    "retention": null_or(integer(0, MAX_INT32)),
    "events": flag,
    "dcp": integer(1, MAX_CONTEXT_PARALLEL_SIZE),
    "hash_lookahead": integer(0, MAX_MODEL_LEN),
}
_GROUP_FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "full": {},
    "swa": {"window": _SPAN},
    "chunked": {"chunk": _SPAN},
    "mamba": {"mode": one_of(("align", "none")), "spec_blocks": integer(0, MAX_MODEL_LEN)},
    "rswa": {"window": _SPAN},
    "cross": {},
}


def check_traces(document: Mapping[str, Any]) -> None:
    """Check a whole file of traces. Raises ValueError for the first thing that no recording may hold."""
    check_recording(document, "traces")
    for index, trace in enumerate(document["traces"]):
        check_trace(trace, index)


def check_trace(trace: Any, index: int = 0) -> None:
    """Check one trace; index is its place in the file. Raises ValueError."""
    with located(name_of("trace", index, trace)):
        check_fields("the trace", trace, {"id": text, "config": check_config, "ops": list_of(anything, at_least=1)})
        operations = _Operations(trace["config"])
        for number, op in enumerate(trace["ops"]):
            operations.check(number, op)
        if not any("out" in op for op in trace["ops"]):
            raise ValueError("no operation has out, the recorded answer; there is nothing to compare")


def check_config(name: str, config: Any) -> None:
    """Check what the recorded ledger was made of."""
    check_fields(name, config, _CONFIG)
    if len(config["groups"]) > MAX_GROUPS:
        raise ValueError(f"groups has {len(config['groups'])} entries; at most {MAX_GROUPS} are played")
    for number, group in enumerate(config["groups"]):
        with located(f"group {number}"):
            _check_group(group)
    _check_sizes(config)


def _check_group(group: Any) -> None:
    kind = group.get("type") if isinstance(group, dict) else None
    if isinstance(group, dict):
        one_of(_GROUP_FIELDS)("type", kind)
    required = {"type": anything, "block_size": _SIZE} | dict(_GROUP_FIELDS.get(str(kind), {}))
    check_fields("the group", group, required, {"eagle": flag})


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Block sizes that fit together; a context-parallel block holds the tokens of all ranks."""
    ranks = config["dcp"]
    sizes = [group["block_size"] * (1 if group["type"] == "mamba" else ranks) for group in config["groups"]]
    scheduler_size, hash_size = config["scheduler_block_size"], config["hash_block_size"]
    if scheduler_size != math.lcm(*sizes):
        raise ValueError(
            f"scheduler_block_size is {scheduler_size}; it must be {shown(math.lcm(*sizes))}, the least common "
            f"multiple of the block sizes {shown(sizes)}"
        )
    if config["enable_caching"] and any(size % hash_size for size in sizes):
        raise ValueError(f"hash_block_size is {hash_size}; it must divide the block sizes {shown(sizes)}")
    if config["retention"] is not None and config["retention"] % scheduler_size:
        raise ValueError(
            f"retention is {config['retention']}; it must be a multiple of scheduler_block_size, {scheduler_size}"
        )


@dataclasses.dataclass(slots=True)
class _Request:
    """What the operations so far say of a request."""

    num_tokens: int
    num_computed: int = 0
    num_allocated: int = 0  # tokens that have slots
    has_row: bool = False  # from its first allocation on, be it refused
    has_blocks: bool = False


class _Operations:
    """Checks the operations of one trace in order; owns what they say of its requests."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.max_model_len: int = config["max_model_len"]
        self.requests: dict[str, _Request] = {}
        self.popped: list[list[int]] = []  # not released yet
        self.previous: Mapping[str, Any] = {}
        tokens = integer(0, self.max_model_len)
        some_tokens = integer(1, self.max_model_len)
        block_id = integer(1, config["num_blocks"] - 1)
        block_or_null = integer(0, config["num_blocks"] - 1)
        tables = exactly(list_of(block_or_null), len(config["groups"]))
        of_request: dict[str, Rule] = {"r": text}
        self.required: dict[str, dict[str, Rule]] = {
            "new": of_request | {"segs": list_of(_check_segment, at_least=1)},
            "step": {},
            "lookup": of_request,
            "alloc": of_request | {"n": tokens},
            "append": of_request | {"toks": list_of(integer(0, MAX_INT32), at_least=1)},
            "computed": of_request | {"v": tokens},
            "cache": of_request | {"n": tokens},
            "free": of_request,
            "preempt": of_request,
            "pop": of_request,
            "release": {"ids": list_of(block_or_null)},
            "copies": {},
            "zero": {},
            "evict": {"ids": list_of(block_id)},
            "reset": {},
        }
        self.optional: dict[str, dict[str, Rule]] = {
            "new": {"salt": text},
            "alloc": {
                "adopt": tokens,
                "la": tokens,
                "ext": tokens,
                "delay": flag,
                "fit": flag,
                "resv": integer(0, config["num_blocks"]),
                "enc": integer(0, MAX_ENCODER_TOKENS),
                "sched": flag,
                "inflight": tokens,
                "computed": some_tokens,
            },
        }
        self.answers: dict[str, dict[str, Rule]] = {
            "lookup": {"hit": _COUNT, "boundary": _COUNT, "blocks": tables},
            "alloc": {"ok": flag, "new": null_or(tables)},
            "cache": {},
            "free": {},
            "preempt": {},
            "pop": {"blocks": list_of(block_or_null)},
            "release": {},
            "copies": {"copies": list_of(exactly(block_id, 2))},
            "zero": {"ids": list_of(block_id)},
            "evict": {},
            "reset": {"ok": flag},
        }
        self.always: dict[str, Rule] = {"free": _COUNT}
        self.optional_answers: dict[str, Rule] = {"table": tables, "events": list_of(_check_event)}
        (self.always if config["enable_caching"] else self.optional_answers)["keys"] = _COUNT
        self.rules_between: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "new": self.new,
            "alloc": self.allocate,
            "append": self.append,
            "computed": self.set_computed,
            "cache": self.cache,
            "free": self.end,
            "preempt": self.end,
            "pop": self.pop,
            "release": self.release,
        }

    def check(self, number: int, op: Any) -> None:
        """Check the next operation, alone and against those before it."""
        with located(f"operation {number}"):
            if not isinstance(op, dict):
                raise ValueError(f"it is {shown(op)}; it must be an object")
            one_of(self.required)("op", op.get("op"))
        name = op["op"]
        with located(f"operation {number} ({name})"):
            answers = name in self.answers
            required: dict[str, Rule] = {"op": anything} | self.required[name] | ({"out": anything} if answers else {})
            check_fields("it", op, required, self.optional.get(name, {}))
            if answers:
                check_fields("out", op["out"], self.answers[name] | self.always, self.optional_answers)
            if "r" in op and name != "new" and op["r"] not in self.requests:
                raise ValueError(f"request {shown(op['r'])} is unknown; a new operation must come before")
            if name in self.rules_between:
                self.rules_between[name](op)
        self.previous = op

    def new(self, op: Mapping[str, Any]) -> None:
        if op["r"] in self.requests:
            raise ValueError(f"request {shown(op['r'])} exists already; a name may be new once")
        self.requests[op["r"]] = _Request(num_tokens=0)
        self.lengthen(self.requests[op["r"]], sum(count for _, count in op["segs"]))

    def append(self, op: Mapping[str, Any]) -> None:
        self.lengthen(self.requests[op["r"]], len(op["toks"]))

    def lengthen(self, request: _Request, num_tokens: int) -> None:
        request.num_tokens += num_tokens
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"the request has {request.num_tokens} tokens with these; max_model_len is {self.max_model_len}"
            )

    def allocate(self, op: Mapping[str, Any]) -> None:
        request, out = self.requests[op["r"]], op["out"]
        self.check_adoption(request, op)
        wanted = op["n"] + op.get("ext", 0)
        if not wanted:
            raise ValueError("n and ext are 0; an allocation must be for 1 token or more")
        end = op.get("adopt", request.num_computed) + wanted
        if end > self.max_model_len:
            raise ValueError(f"n is {op['n']}, which ends at token {end}; max_model_len is {self.max_model_len}")
        if out["ok"] and ("computed" not in op or out["new"] is None):
            raise ValueError("out.ok is true; then computed and out.new must be given")
        self.give_row(request)
        if out["ok"]:
            if op["computed"] > end:
                raise ValueError(f"computed is {op['computed']}; the allocation ends at token {end}")
            request.num_computed, request.has_blocks = op["computed"], True
            request.num_allocated = max(request.num_allocated, end)

    def check_adoption(self, request: _Request, op: Mapping[str, Any]) -> None:
        """A first allocation adopts what the lookup just before found: that it is all of that, the player checks."""
        if request.has_blocks != ("adopt" not in op):
            raise ValueError("adopt must be given on the first allocation of a request, and only there")
        if request.has_blocks:
            return
        if self.previous.get("op") != "lookup" or self.previous["r"] != op["r"]:
            raise ValueError("adopt is given; the operation before must be a lookup of the same request")
        if op["adopt"] >= request.num_tokens:
            raise ValueError(f"adopt is {op['adopt']}; a request of {request.num_tokens} tokens can adopt one less")

    def give_row(self, request: _Request) -> None:
        request.has_row = True
        num_rows = sum(one.has_row for one in self.requests.values())
        if num_rows > MAX_ROWS:
            raise ValueError(f"{num_rows} requests hold blocks at once; at most {MAX_ROWS} are played")

    def set_computed(self, op: Mapping[str, Any]) -> None:
        request = self.requests[op["r"]]
        if op["v"] > request.num_allocated:
            raise ValueError(f"v is {op['v']}; the request has slots for {request.num_allocated} tokens")
        request.num_computed = op["v"]

    def cache(self, op: Mapping[str, Any]) -> None:
        request = self.requests[op["r"]]
        limit = min(request.num_computed, request.num_tokens)
        if op["n"] > limit:
            raise ValueError(f"n is {op['n']}; {limit} tokens of the request are known and computed")
        self.check_row(op)

    def end(self, op: Mapping[str, Any]) -> None:
        self.check_row(op)
        num_tokens = self.requests[op["r"]].num_tokens
        self.requests[op["r"]] = _Request(num_tokens=num_tokens)

    def pop(self, op: Mapping[str, Any]) -> None:
        self.end(op)
        if op["out"]["blocks"] in self.popped:
            raise ValueError(f"out.blocks is {shown(op['out']['blocks'])}; these were popped and not released since")
        self.popped.append(op["out"]["blocks"])

    def release(self, op: Mapping[str, Any]) -> None:
        if op["ids"] not in self.popped:
            raise ValueError(f"ids is {shown(op['ids'])}; a pop must have given these, and no release taken them since")
        self.popped.remove(op["ids"])

    def check_row(self, op: Mapping[str, Any]) -> None:
        if not self.requests[op["r"]].has_row:
            raise ValueError(f"request {shown(op['r'])} holds no blocks; an alloc must come before")


def _check_segment(name: str, segment: Any) -> None:
    """A range [a, n] of token ids: a, a+1, ... a+n-1."""
    exactly(anything, 2)(name, segment)
    first, count = segment
    integer(0, MAX_INT32)(f"{name}[0]", first)
    integer(1, MAX_INT32 - first)(f"{name}[1]", count)


def _check_event(name: str, event: Any) -> None:
    list_of(anything, at_least=1)(name, event)
    one_of(("stored", "removed", "cleared"))(f"{name}[0]", event[0])
