"""Replays recorded KV ledger traces against KVCacheManager, comparing everything down to block ids.

A trace names requests and says what the scheduler did; this adapter plays the scheduler: it gives every
request a row when its first allocation is tried, and keeps waiting requests' hashes meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.coordinator import PrefixHit
from blockferry.engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.rows import RowTable


def load_traces(path: Path) -> list[dict[str, Any]]:
    """The traces of a compressed file."""
    traces: list[dict[str, Any]] = json.loads(lzma.decompress(path.read_bytes()))["traces"]
    return traces


def family_of(trace: dict[str, Any]) -> str:
    """Trace `full-bs16-3` belongs to family `full-bs16`."""
    return str(trace["id"]).rpartition("-")[0]


@dataclasses.dataclass
class _Sequence:
    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    hashes: RequestHashes
    status: str = "waiting"
    row: int | None = None


class TraceReplay:
    """One trace, one ledger. run() returns the first difference as text, or None."""

    def __init__(self, trace: dict[str, Any]) -> None:
        config = trace["config"]
        self.trace = trace
        self.rows = RowTable(max_rows=256, max_model_len=config["max_model_len"])
        self.events = EventLog() if config["events"] else None
        # under context parallelism a rank's block stands for block_size * dcp tokens of the sequence
        specs = [
            AttentionSpec(
                block_size=g["block_size"] * config["dcp"], content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2)
            )
            for g in config["groups"]
        ]
        groups = tuple(KVCacheGroup(layer_ids=(i,), spec=spec) for i, spec in enumerate(specs))
        self.kv = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["num_blocks"], groups=groups, hash_block_size=min(spec.block_size for spec in specs)
            ),
            self.rows,
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            events=self.events,
        )
        self.sequences: dict[str, _Sequence] = {}
        self.free_rows = list(range(255, -1, -1))
        self.hit: PrefixHit | None = None
        self.event_numbers: dict[bytes, int] = {}

    def run(self) -> str | None:
        for index, op in enumerate(self.trace["ops"]):
            got = getattr(self, "op_" + op["op"])(op)
            want = op.get("out")
            if want is not None:
                got["free"] = self.kv.num_free_blocks
                got["keys"] = self.kv.stats().num_keys
                events = self.drain_events()
                if events:
                    got["events"] = events
                want = {key: value for key, value in want.items() if key != "table" or "table" in got}
                got = {key: value for key, value in got.items() if key in want or key == "events"}
                if got != want:
                    return f"{self.trace['id']} op {index} {op}: got {got}"
            self.kv.check_integrity()
        return None

    def op_step(self, op: dict[str, Any]) -> dict[str, Any]:
        return {}

    def op_new(self, op: dict[str, Any]) -> dict[str, Any]:
        tokens = np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in op["segs"]])
        hashes = self.kv.hash_prompt(tokens, cache_salt=op.get("salt", ""))
        self.sequences[op["r"]] = _Sequence(tokens=tokens, num_prompt_tokens=len(tokens), hashes=hashes)
        return {}

    def op_lookup(self, op: dict[str, Any]) -> dict[str, Any]:
        sequence = self.sequences[op["r"]]
        sequence.hashes.extend(sequence.tokens)
        self.hit = self.kv.lookup(sequence.hashes, len(sequence.tokens))
        # boundary is the junction for sparse checkpoints of later cache types: never one with full attention only
        return {
            "hit": self.hit.num_tokens,
            "boundary": 0,
            "blocks": [ids.tolist() for ids in self.hit.block_ids],
        }

    def op_alloc(self, op: dict[str, Any]) -> dict[str, Any]:
        sequence = self.sequences[op["r"]]
        if sequence.row is None:
            sequence.row = self.free_rows.pop()
            self.rows.assign(sequence.row, sequence.tokens, num_prompt_tokens=sequence.num_prompt_tokens)
            self.kv.start_row(sequence.row, sequence.hashes)
        row = sequence.row
        before = [self.kv.block_ids(row, g).tolist() for g in range(self.kv.num_groups)]
        options = AllocateOptions(
            hit=self.hit if "adopt" in op else None,
            num_external_tokens=op.get("ext", 0),
            num_lookahead_tokens=op.get("la", 0),
            delay_caching=op.get("delay", False),
            full_sequence_must_fit=op.get("fit", False),
            num_reserved_blocks=op.get("resv", 0),
            apply_watermark=op.get("sched", False) and sequence.status in ("waiting", "preempted"),
        )
        ok = self.kv.allocate(row, op["n"], options)
        table = [self.kv.block_ids(row, g).tolist() for g in range(self.kv.num_groups)]
        if not ok:
            assert table == before, (table, before)
            return {"ok": False, "new": None}
        self.rows.num_computed_tokens[row] = op["computed"]
        sequence.status = "loading" if op.get("delay") else "running"
        recorded = op["out"]
        if "table" in recorded:
            return {"ok": True, "new": recorded["new"], "table": table}
        return {"ok": True, "new": [after[len(old) :] for after, old in zip(table, before)]}

    def op_append(self, op: dict[str, Any]) -> dict[str, Any]:
        sequence = self.sequences[op["r"]]
        tokens = np.asarray(op["toks"], np.int32)
        sequence.tokens = np.concatenate([sequence.tokens, tokens])
        if sequence.row is not None:
            for token in tokens:
                self.rows.append(np.asarray([sequence.row], np.int32), token[None])
        return {}

    def op_computed(self, op: dict[str, Any]) -> dict[str, Any]:
        row = self.sequences[op["r"]].row
        if row is not None:  # a failed load is freed first, then told that it has computed nothing
            self.rows.num_computed_tokens[row] = op["v"]
        return {}

    def op_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        row = self.sequences[op["r"]].row
        assert row is not None
        assert self.rows.num_computed_tokens[row] == op["n"], op
        self.kv.cache_filled(np.asarray([row], np.int32))
        return {}

    def op_free(self, op: dict[str, Any]) -> dict[str, Any]:
        self.end_row(op["r"])
        return {}

    def op_preempt(self, op: dict[str, Any]) -> dict[str, Any]:
        self.end_row(op["r"])
        self.sequences[op["r"]].status = "preempted"
        return {}

    def op_pop(self, op: dict[str, Any]) -> dict[str, Any]:
        sequence = self.sequences[op["r"]]
        assert sequence.row is not None
        blocks = self.kv.pop_blocks_for_free(sequence.row).tolist()
        self.end_row(op["r"])
        return {"blocks": blocks}

    def op_release(self, op: dict[str, Any]) -> dict[str, Any]:
        self.kv.release(np.asarray(op["ids"], np.int32))
        return {}

    def op_evict(self, op: dict[str, Any]) -> dict[str, Any]:
        self.kv.evict_blocks(np.asarray(op["ids"], np.int32))
        return {}

    def op_reset(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.kv.reset_prefix_cache()}

    def end_row(self, name: str) -> None:
        sequence = self.sequences[name]
        if sequence.row is not None:
            self.kv.free(sequence.row)
            self.rows.clear(sequence.row)
            self.free_rows.append(sequence.row)
            sequence.row = None

    def drain_events(self) -> list[list[Any]]:
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
