"""Replays recorded KV ledger traces against KVCacheManager.

A trace names requests and says what a scheduler did and what the recorded ledger answered; this module plays that
scheduler. Two levels of agreement:

    contract  decisions and counts: ok, hit, boundary, blocks and nulls per table, free blocks, reset
    strict    the same and block ids, keys, copies, blocks to clear and events
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import (
    ChunkReach,
    EncoderReach,
    FullReach,
    KVContent,
    Reach,
    RetainedPromptReach,
    WindowReach,
)
from blockferry.engine.kv.replay_checks import MAX_ENCODER_TOKENS, MAX_ROWS
from blockferry.engine.kv.replay_rules import located
from blockferry.engine.kv.spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaMode,
    MambaSpec,
)
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

Answer = dict[str, Any]


class ReplayLevel(enum.StrEnum):
    """How much must agree; see the module."""

    CONTRACT = "contract"
    STRICT = "strict"


def replay_trace(trace: Mapping[str, Any], level: ReplayLevel) -> str | None:
    """The first difference as text, or None. Checks the ledger's integrity after every operation.

    The trace must be one that replay_checks.check_trace passes. Raises ValueError, with the trace's id and the number
    of the operation, for what the ledger itself refuses.
    """
    with located(f"trace {trace['id']}"):
        return _TraceReplay(trace).run(level)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sequence:
    """A request of the trace."""

    tokens: Int32Array
    num_prompt_tokens: int
    hashes: RequestHashes
    status: str = "waiting"
    row: int | None = None


class _TraceReplay:
    def __init__(self, trace: Mapping[str, Any]) -> None:
        self.trace = trace
        config = trace["config"]
        self.rows = RowTable(max_rows=MAX_ROWS, max_model_len=config["max_model_len"])
        self.kv = KVCacheManager(
            ledger_config(config),
            self.rows,
            options=LedgerOptions(
                enable_caching=config["enable_caching"],
                watermark=config["watermark"],
                max_in_flight_tokens=config["max_in_flight_tokens"],
                max_num_encoder_tokens=MAX_ENCODER_TOKENS,
                retention_interval=config["retention"],
                num_hash_lookahead_tokens=config["hash_lookahead"],
            ),
            events=EventLog() if config["events"] else None,
        )
        self.sequences: dict[str, _Sequence] = {}
        self.free_rows = list(range(MAX_ROWS - 1, -1, -1))
        self.hit: PrefixHit | None = None
        self.recorded_hit = 0
        self.popped: dict[tuple[int, ...], tuple[Int32Array, ...]] = {}
        self.event_numbers: dict[bytes, int] = {}
        self.operations: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "step": self.step,
            "new": self.new,
            "lookup": self.lookup,
            "alloc": self.allocate,
            "append": self.append,
            "computed": self.set_computed,
            "cache": self.cache,
            "free": self.free,
            "preempt": self.preempt,
            "pop": self.pop,
            "release": self.release,
            "copies": self.copies,
            "zero": self.zero,
            "evict": self.evict,
            "reset": self.reset,
        }

    def run(self, level: ReplayLevel) -> str | None:
        for number, op in enumerate(self.trace["ops"]):
            with located(f"operation {number} ({op['op']})"):
                got = self.operations[op["op"]](op)
            wanted = op.get("out")
            if wanted is not None:
                got["free"] = self.kv.num_free_blocks
                got["keys"] = self.kv.stats().num_keys
                got["events"] = self.events()
                difference = compare(self.wanted_of(op, wanted), got, level)
                if difference:
                    asked = {key: value for key, value in op.items() if key != "out"}
                    return f"{self.trace['id']}, operation {number}, {asked}: {difference}"
            self.kv.check_integrity()
        return None

    def wanted_of(self, op: Mapping[str, Any], out: Mapping[str, Any]) -> Answer:
        """The recorded answer, with the whole table of an allocation where only what is new was recorded."""
        wanted = dict(out)
        wanted.setdefault("events", [])
        if op["op"] == "alloc" and out["ok"] and "table" not in out:
            wanted["table"] = [before + new for before, new in zip(self.table_before, out["new"], strict=True)]
        wanted.pop("new", None)
        return wanted

    # operations

    def step(self, _: Mapping[str, Any]) -> Answer:
        self.kv.start_step()
        return {}

    def new(self, op: Mapping[str, Any]) -> Answer:
        tokens = np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in op["segs"]])
        hashes = self.kv.hash_prompt(tokens, cache_salt=op.get("salt", ""))
        self.sequences[op["r"]] = _Sequence(tokens=tokens, num_prompt_tokens=len(tokens), hashes=hashes)
        return {}

    def lookup(self, op: Mapping[str, Any]) -> Answer:
        sequence = self.sequences[op["r"]]
        if self.trace["config"]["enable_caching"]:
            sequence.hashes.extend(sequence.tokens)
        self.hit = self.kv.lookup(sequence.hashes, len(sequence.tokens))
        self.recorded_hit = op["out"]["hit"]
        return {
            "hit": self.hit.num_tokens,
            "boundary": self.hit.junction,
            "blocks": [block_ids.tolist() for block_ids in self.hit.block_ids],
        }

    def allocate(self, op: Mapping[str, Any]) -> Answer:
        sequence = self.sequences[op["r"]]
        if sequence.row is None:
            sequence.row = self.free_rows.pop()
            self.rows.assign(sequence.row, sequence.tokens, num_prompt_tokens=sequence.num_prompt_tokens)
            self.kv.start_row(sequence.row, sequence.hashes)
        row = sequence.row
        self.table_before = self.table(row)
        options = AllocateOptions(
            hit=self.adopted(sequence, op["adopt"]) if "adopt" in op else None,
            num_external_tokens=op.get("ext", 0),
            num_lookahead_tokens=op.get("la", 0),
            num_in_flight_tokens=op.get("inflight", 0),
            num_encoder_tokens=op.get("enc", 0),
            delay_caching=op.get("delay", False),
            full_sequence_must_fit=op.get("fit", False),
            num_reserved_blocks=op.get("resv", 0),
            apply_watermark=op.get("sched", False) and sequence.status in {"waiting", "preempted"},
        )
        if not self.kv.allocate(row, op["n"], options):
            return {"ok": False, "table": self.table(row)}
        self.rows.num_computed_tokens[row] = op["computed"]
        sequence.status = "loading" if op.get("delay") else "running"
        return {"ok": True, "table": self.table(row)}

    def append(self, op: Mapping[str, Any]) -> Answer:
        sequence = self.sequences[op["r"]]
        tokens = np.asarray(op["toks"], np.int32)
        sequence.tokens = np.concatenate([sequence.tokens, tokens])
        if sequence.row is not None:
            for token in tokens:
                self.rows.append(np.array([sequence.row], np.int32), token[None])
        return {}

    def set_computed(self, op: Mapping[str, Any]) -> Answer:
        row = self.sequences[op["r"]].row
        if row is not None:  # a failed load is freed first, then told that it has computed nothing
            self.rows.num_computed_tokens[row] = op["v"]
        return {}

    def cache(self, op: Mapping[str, Any]) -> Answer:
        row = self.sequences[op["r"]].row
        assert row is not None, op
        computed = int(self.rows.num_computed_tokens[row])
        self.rows.num_computed_tokens[row] = op["n"]
        self.kv.cache_prefix(row)
        self.rows.num_computed_tokens[row] = computed
        return {}

    def free(self, op: Mapping[str, Any]) -> Answer:
        self.end_row(op["r"])
        return {}

    def preempt(self, op: Mapping[str, Any]) -> Answer:
        self.end_row(op["r"])
        self.sequences[op["r"]].status = "preempted"
        return {}

    def pop(self, op: Mapping[str, Any]) -> Answer:
        sequence = self.sequences[op["r"]]
        assert sequence.row is not None, op
        popped = self.kv.pop_blocks_for_free(sequence.row)
        self.end_row(op["r"])
        block_ids = np.concatenate(popped).tolist()
        self.popped[tuple(op["out"]["blocks"])] = popped
        return {"blocks": block_ids}

    def release(self, op: Mapping[str, Any]) -> Answer:
        self.kv.release(self.popped.pop(tuple(op["ids"])))
        return {}

    def copies(self, _: Mapping[str, Any]) -> Answer:
        return {"copies": self.kv.take_copies()[:, 1:].tolist()}

    def zero(self, _: Mapping[str, Any]) -> Answer:
        return {"ids": self.kv.take_zero()[:, 1].tolist()}

    def evict(self, op: Mapping[str, Any]) -> Answer:
        self.kv.evict_blocks(np.asarray(op["ids"], np.int32))
        return {}

    def reset(self, _: Mapping[str, Any]) -> Answer:
        return {"ok": self.kv.reset_prefix_cache()}

    # steps of the above

    def adopted(self, sequence: _Sequence, num_tokens: int) -> PrefixHit | None:
        """What the recorded scheduler adopted: less than was found here where the recorded ledger found less."""
        if num_tokens != self.recorded_hit:
            raise ValueError(f"adopt is {num_tokens}; the lookup before found {self.recorded_hit} tokens")
        if self.hit is not None and self.hit.num_tokens > num_tokens:
            return self.kv.lookup(sequence.hashes, num_tokens + 1)
        return self.hit

    def table(self, row: int) -> list[list[int]]:
        return [self.kv.block_ids(row, group).tolist() for group in range(self.kv.num_groups)]

    def end_row(self, name: str) -> None:
        sequence = self.sequences[name]
        if sequence.row is not None:
            self.kv.free(sequence.row)
            self.rows.clear(sequence.row)
            self.free_rows.append(sequence.row)
            sequence.row = None

    def events(self) -> list[list[Any]]:
        drained: list[list[Any]] = []
        for event in self.kv.take_events():
            match event:
                case BlockStored():
                    parent = None if event.parent_hash is None else self.number(event.parent_hash)
                    hashes = [self.number(digest) for digest in event.block_hashes]
                    drained.append(["stored", event.group, parent, hashes, event.block_size, len(event.token_ids)])
                case BlockRemoved():
                    drained.append(["removed", event.group, [self.number(digest) for digest in event.block_hashes]])
                case AllBlocksCleared():
                    drained.append(["cleared"])
        return drained

    def number(self, digest: bytes) -> int:
        return self.event_numbers.setdefault(digest, len(self.event_numbers))


def ledger_config(config: Mapping[str, Any]) -> KVCacheConfig:
    """The ledger that a trace was recorded with."""
    has_draft = any(group.get("eagle", False) for group in config["groups"])
    groups = tuple(
        KVCacheGroup(
            layer_ids=(number,),
            spec=_spec(group, config["dcp"]),
            is_draft=config["use_eagle"] and (group.get("eagle", False) or not has_draft) and group["type"] != "mamba",
        )
        for number, group in enumerate(config["groups"])
    )
    return KVCacheConfig(num_blocks=config["num_blocks"], groups=groups, hash_block_size=config["hash_block_size"])


def _spec(group: Mapping[str, Any], context_parallel_size: int) -> KVCacheSpec:
    if group["type"] == "mamba":
        return MambaSpec(
            block_size=group["block_size"],
            shapes=((8,),),
            dtype_bytes=(4,),
            mode=MambaMode(group["mode"]),
            num_speculative_blocks=group["spec_blocks"],
        )
    reach: Reach
    match group["type"]:
        case "full":
            reach = FullReach()
        case "swa":
            reach = WindowReach(window=group["window"])
        case "chunked":
            reach = ChunkReach(chunk=group["chunk"])
        case "rswa":
            reach = RetainedPromptReach(window=group["window"])
        case "cross":
            reach = EncoderReach()
        case other:
            raise ValueError(f"group type {other!r} is unknown; use full, swa, chunked, rswa, cross or mamba")
    return AttentionSpec(
        block_size=group["block_size"],
        content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2),
        reach=reach,
        context_parallel_size=context_parallel_size,
    )


def compare(wanted: Mapping[str, Any], got: Mapping[str, Any], level: ReplayLevel) -> str | None:
    """The first field that differs, as text; None when all that the level asks for agree.

    A longer hit than the recorded one agrees with the contract: the search here finds the longest one there is.
    """
    if level is ReplayLevel.CONTRACT and got.get("hit", 0) > wanted.get("hit", 0):
        wanted = {"free": wanted["free"]}
    for field, value in wanted.items():
        mine = got.get(field)
        if level is ReplayLevel.CONTRACT:
            if field in {"keys", "copies", "ids", "events"} or (field == "blocks" and "hit" not in wanted):
                continue
            if field in {"blocks", "table"} and mine is not None and _nulls(mine) == _nulls(value):
                continue
        if mine != value:
            return f"{field} is {mine}, recorded {value}"
    return None


def _nulls(table: list[list[int]]) -> list[list[bool]]:
    return [[block_id == 0 for block_id in block_ids] for block_ids in table]
