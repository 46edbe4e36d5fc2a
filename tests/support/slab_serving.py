"""Serves made-up requests on a ledger of slabs, the way a scheduler would, and writes down what the ledger said."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.events import EventLog, KVEvent
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent, LatentContent, WindowReach
from blockferry.engine.kv.slab_pools import SlabPools
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, MambaSpec, SlabGeometry
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

MAX_ROWS = 5
MAX_MODEL_LEN = 64
CHUNK = 16  # most tokens of one step


def ints(values: list[int]) -> Int32Array:
    return np.asarray(values, np.int32)


def full(block_size: int) -> AttentionSpec:
    return AttentionSpec(block_size=block_size, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2))


def latent(block_size: int) -> AttentionSpec:
    return AttentionSpec(block_size=block_size, content=LatentContent(latent_dim=24, dtype_bytes=2))


def window(block_size: int, num_tokens: int) -> AttentionSpec:
    return dataclasses.replace(full(block_size), reach=WindowReach(window=num_tokens))


def states(block_size: int) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((8,),), dtype_bytes=(4,))


def geometry(
    pages_per_slab: tuple[int, ...], num_slabs: int, *, tail_group: int = 0, tail_pages: int = 0
) -> SlabGeometry:
    """Slabs that these many pages of each group fill."""
    slab_bytes = math.lcm(*pages_per_slab) * 16
    strides = tuple(slab_bytes // pages for pages in pages_per_slab)
    return SlabGeometry(
        slab_bytes=slab_bytes,
        num_slabs=num_slabs,
        pages_per_slab=pages_per_slab,
        page_stride_bytes=strides,
        null_bytes=max(strides),
        tail_group=tail_group,
        tail_pages=tail_pages,
    )


def slab_config(specs: list[KVCacheSpec], slab: SlabGeometry) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=1 + max(slab.num_pages(group) for group in range(len(specs))),
        groups=tuple(KVCacheGroup(layer_ids=(layer,), spec=spec) for layer, spec in enumerate(specs)),
        hash_block_size=math.gcd(*(spec.tokens_per_block for spec in specs)),
        slab=slab,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """How a request comes in."""

    tokens: list[int]
    chunk: int = CHUNK  # tokens of its first step
    num_external_blocks: int = 0  # of the scheduler's size
    delay: bool = False
    must_fit: bool = False
    num_reserved: int = 0
    watermark: bool = False


@dataclasses.dataclass
class Running:
    tokens: list[int]
    num_loading: int = 0  # computed once external tokens have arrived; 0: nothing is on its way


class Serving:
    """A ledger, its rows, and a journal of all answers."""

    def __init__(self, config: KVCacheConfig, *, watermark: float = 0.0, num_lookahead: int = 0) -> None:
        self.rows = RowTable(max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)
        self.events = EventLog()
        options = LedgerOptions(
            watermark=watermark, num_lookahead_tokens=num_lookahead, max_in_flight_tokens=CHUNK + num_lookahead
        )
        self.kv = KVCacheManager(config, self.rows, options=options, events=self.events)
        self.running: dict[int, Running] = {}
        self.popped: list[tuple[Int32Array, ...]] = []
        self.journal: list[object] = []
        self.heard: list[KVEvent] = []
        self.num_lookahead = num_lookahead
        self.alignment = math.lcm(*(group.spec.tokens_per_block for group in config.groups))
        self.state_blocks = [
            group.spec.tokens_per_block for group in config.groups if isinstance(group.spec, MambaSpec)
        ]

    @property
    def pools(self) -> SlabPools:
        pools = self.kv._pools
        assert isinstance(pools, SlabPools)
        return pools

    def computed(self, row: int) -> int:
        return int(self.rows.num_computed_tokens[row])

    def free_rows(self) -> list[int]:
        return [row for row in range(MAX_ROWS) if row not in self.running]

    def loading(self) -> list[int]:
        return [row for row, one in self.running.items() if one.num_loading]

    def prefilling(self) -> list[int]:
        ready = [row for row, one in self.running.items() if not one.num_loading]
        return [row for row in ready if self.computed(row) < len(self.running[row].tokens) - 1]

    def decoding(self) -> list[int]:
        ready = [row for row, one in self.running.items() if not one.num_loading and self.computed(row)]
        return [
            row
            for row in ready
            if self.computed(row) >= len(self.running[row].tokens) - 1 and self.computed(row) < MAX_MODEL_LEN - 1
        ]

    def admit(self, admission: Admission) -> bool:
        """Look up and allocate; False when refused."""
        tokens, row = admission.tokens, self.free_rows()[0]
        self.kv.start_step()
        hashes = self.kv.hash_prompt(ints(tokens))
        hit = self.kv.lookup(hashes, len(tokens))
        num_left = len(tokens) - hit.num_tokens
        num_external = min(admission.num_external_blocks * self.alignment, num_left // self.alignment * self.alignment)
        start = hit.num_tokens + num_external
        stop = self.chunk_end(start, min(len(tokens), start + admission.chunk))
        if num_external and admission.delay:
            stop = start
        if stop == hit.num_tokens:
            return False
        self.rows.assign(row, ints(tokens), num_prompt_tokens=len(tokens))
        self.kv.start_row(row, hashes)
        options = AllocateOptions(
            hit=hit,
            num_external_tokens=num_external,
            num_lookahead_tokens=self.num_lookahead,
            delay_caching=admission.delay and num_external > 0,
            full_sequence_must_fit=admission.must_fit,
            num_reserved_blocks=admission.num_reserved,
            apply_watermark=admission.watermark,
        )
        ok = self.kv.allocate(row, stop - start, options)
        self.journal.append(("admit", hit.num_tokens, hit.junction, ok))
        if ok:
            self.running[row] = Running(tokens=list(tokens), num_loading=stop if options.delay_caching else 0)
            if not options.delay_caching:
                self.rows.num_computed_tokens[row] = stop
        else:
            self.kv.free(row)
            self.rows.clear(row)
        self.end_step()
        return ok

    def end_load(self, row: int, *, arrived: bool) -> None:
        """External tokens came, or will not: then the row ends."""
        one = self.running[row]
        if not arrived:
            self.free(row)
            return
        self.rows.num_computed_tokens[row], one.num_loading = one.num_loading, 0
        self.kv.cache_prefix(row)
        self.end_step()

    def prefill(self, row: int, chunk: int) -> bool:
        """The next chunk of a prompt; False when refused."""
        start = self.computed(row)
        stop = self.chunk_end(start, min(len(self.running[row].tokens), start + chunk))
        self.kv.start_step()
        ok = self.kv.allocate(row, stop - start)
        self.journal.append(("prefill", ok))
        if ok:
            self.rows.num_computed_tokens[row] = stop
        self.end_step()
        return ok

    def decode(self, rows: list[int], token: int) -> int:
        """One token for each of rows; how many of them got it."""
        self.kv.start_step()
        for row in rows:
            if self.computed(row) == len(self.running[row].tokens):
                self.running[row].tokens.append(token)
                self.rows.append(ints([row]), ints([token]))
        num_served = self.kv.allocate_decode(ints(rows))
        self.journal.append(("decode", num_served))
        served = ints(rows[:num_served])
        self.rows.num_computed_tokens[served] += 1
        if num_served:
            self.kv.cache_filled(served)
        self.end_step()
        return num_served

    def free(self, row: int) -> None:
        """A request ends or is preempted."""
        self.kv.free(row)
        self.forget(row)

    def pop(self, row: int) -> None:
        """A request ends, but its blocks are still read."""
        self.popped.append(self.kv.pop_blocks_for_free(row))
        self.forget(row)

    def release(self, number: int) -> None:
        """The reader has finished."""
        self.kv.release(self.popped.pop(number))
        self.end_step()

    def reset(self) -> bool:
        """Empty the prefix cache if nothing is held."""
        is_empty = self.kv.reset_prefix_cache()
        self.journal.append(("reset", is_empty))
        return is_empty

    def finish(self) -> None:
        """Everything ends."""
        for row in list(self.running):
            self.free(row)
        while self.popped:
            self.release(0)

    def chunk_end(self, start: int, stop: int) -> int:
        """Where a step may end that wants to reach stop: a running state that is inside a block may not leave it."""
        for block in self.state_blocks:
            if start % block:
                stop = min(stop, (start // block + 1) * block)
        return stop

    def forget(self, row: int) -> None:
        self.rows.clear(row)
        del self.running[row]
        self.end_step()

    def end_step(self) -> None:
        self.kv.take_copies()
        self.kv.take_deltas()
        self.heard += self.kv.take_events()
        self.journal.append((self.kv.num_free_blocks, self.kv.stats().num_keys))


def act(serving: Serving, rng: random.Random) -> None:
    """Anything that a scheduler does, at random."""
    choice = rng.random()
    if choice < 0.4 and serving.free_rows():
        tokens = [rng.randrange(2)] * rng.randint(1, 30) + [rng.randrange(2) for _ in range(rng.randint(0, 10))]
        admission = Admission(
            tokens=tokens,
            chunk=rng.randint(1, CHUNK),
            num_external_blocks=rng.choice((0, 0, 1)),
            delay=rng.random() < 0.3,
            must_fit=rng.random() < 0.5,
            num_reserved=rng.choice((0, 0, 3)),
            watermark=rng.random() < 0.5,
        )
        serving.admit(admission)
    elif choice < 0.5 and serving.loading():
        serving.end_load(rng.choice(serving.loading()), arrived=rng.random() < 0.7)
    elif choice < 0.65 and serving.prefilling():
        serving.prefill(rng.choice(serving.prefilling()), rng.randint(1, CHUNK))
    elif choice < 0.85 and serving.decoding():
        serving.decode(serving.decoding(), rng.randrange(2))
    elif choice < 0.95 and serving.running:
        end = serving.free if rng.random() < 0.7 else serving.pop
        end(rng.choice(sorted(serving.running)))
    elif serving.popped:
        serving.release(0)
    elif choice > 0.99:
        serving.reset()
