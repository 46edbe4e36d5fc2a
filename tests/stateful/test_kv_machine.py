"""The ledger against a naive one, through any history the scheduler could write; audited after every step."""

import dataclasses

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from support.kv_model import NaiveLedger

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

BLOCK_SIZE = 4
MAX_MODEL_LEN = 44  # not a multiple of two blocks, so that the last block can be cut short by lookahead
MAX_ROWS = 6


@dataclasses.dataclass
class Sequence:
    tokens: list[int]
    salt: str
    num_loading: int = 0  # external tokens that have not arrived


@dataclasses.dataclass(frozen=True)
class Admission:
    salt: str = ""
    chunk: int = MAX_MODEL_LEN
    num_external_blocks: int = 0
    delay: bool = False
    fit: bool = False
    reserved: int = 0
    watermark: bool = False


def ints(values: list[int]) -> Int32Array:
    return np.asarray(values, np.int32)


prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 6)).map(
    # few distinct beginnings, so that prefixes are shared
    lambda drawn: [drawn[0]] * drawn[1] + [7] * drawn[2]
)


def some_of(rows: list[int]) -> st.SearchStrategy[list[int]]:
    """All of them, as in most steps, or a few in any order."""
    return st.just(rows) | st.lists(st.sampled_from(rows), unique=True, min_size=1)


class LedgerMachine(RuleBasedStateMachine):
    popped: Bundle[list[int]] = Bundle("popped")

    @initialize(num_blocks=st.integers(4, 16), num_lookahead=st.integers(0, 5), watermark=st.sampled_from([0.0, 0.2]))
    def start(self, num_blocks: int, num_lookahead: int, watermark: float) -> None:
        self.rows = RowTable(max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)
        spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2))
        self.kv = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                groups=(KVCacheGroup(layer_ids=(0,), spec=spec),),
                hash_block_size=BLOCK_SIZE,
            ),
            self.rows,
            options=LedgerOptions(watermark=watermark, num_lookahead_tokens=num_lookahead),
        )
        self.model = NaiveLedger(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_watermark_blocks=int(watermark * num_blocks),
        )
        self.num_lookahead = num_lookahead
        self.worker = BlockTable(max_rows=MAX_ROWS, max_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
        self.sequences: dict[int, Sequence] = {}

    @property
    def free_rows(self) -> list[int]:
        return [row for row in range(MAX_ROWS) if row not in self.sequences]

    def computed(self, row: int) -> int:
        return int(self.rows.num_computed_tokens[row])

    @precondition(lambda self: self.free_rows)
    @rule(tokens=prompts)
    def admit_whole_prompt(self, tokens: list[int]) -> None:
        self.admit(tokens, Admission())

    @precondition(lambda self: self.free_rows)
    @rule(
        tokens=prompts,
        admission=st.builds(
            Admission,
            salt=st.sampled_from(["", "", "tenant"]),
            chunk=st.integers(0, 16),
            num_external_blocks=st.integers(0, 3),
            delay=st.booleans(),
            fit=st.booleans(),
            reserved=st.sampled_from([0, 0, 3]),
            watermark=st.booleans(),
        ),
    )
    def admit_in_some_way(self, tokens: list[int], admission: Admission) -> None:
        self.admit(tokens, admission)

    def admit(self, tokens: list[int], admission: Admission) -> None:
        salt = admission.salt
        row, hit = self.free_rows[0], self.model.lookup(salt, tokens)
        num_hit = len(hit) * BLOCK_SIZE
        num_external = min(admission.num_external_blocks * BLOCK_SIZE, len(tokens) - num_hit)
        num_new = min(admission.chunk, len(tokens) - num_hit - num_external)
        if num_new + num_external == 0:
            return
        hashes = self.kv.hash_prompt(ints(tokens), cache_salt=salt)
        found = self.kv.lookup(hashes, len(tokens))
        assert (found.num_tokens, found.block_ids[0].tolist()) == (num_hit, hit)
        self.rows.assign(row, ints(tokens), num_prompt_tokens=len(tokens))
        self.kv.start_row(row, hashes)
        total = num_hit + num_external + num_new
        slots = min(total + self.num_lookahead, MAX_MODEL_LEN)
        ok = self.kv.allocate(
            row,
            num_new,
            AllocateOptions(
                hit=found,
                num_external_tokens=num_external,
                num_lookahead_tokens=self.num_lookahead,
                delay_caching=admission.delay,
                full_sequence_must_fit=admission.fit,
                num_reserved_blocks=admission.reserved,
                apply_watermark=admission.watermark,
            ),
        )
        assert ok == self.model.has_room(
            row,
            slots,
            hit,
            num_tokens=len(tokens),
            fit=admission.fit,
            reserved=admission.reserved,
            watermark=admission.watermark,
        )
        if not ok:
            self.kv.free(row)
            self.rows.clear(row)
            return
        self.model.adopt(row, hit)
        self.model.grow(row, slots)
        self.sequences[row] = Sequence(tokens=tokens, salt=salt, num_loading=total if admission.delay else 0)
        if not admission.delay:
            self.model.cache(row, salt, tokens[:total])
            self.rows.num_computed_tokens[row] = total

    @precondition(lambda self: any(sequence.num_loading for sequence in self.sequences.values()))
    @rule(data=st.data(), arrived=st.booleans())
    def end_load(self, data: st.DataObject, arrived: bool) -> None:
        row = data.draw(st.sampled_from([row for row, seq in self.sequences.items() if seq.num_loading]))
        sequence = self.sequences[row]
        if arrived:
            self.rows.num_computed_tokens[row] = sequence.num_loading
            self.kv.cache_filled(ints([row]))
            self.model.cache(row, sequence.salt, sequence.tokens[: sequence.num_loading])
        sequence.num_loading = 0  # a failed load leaves the row with blocks to compute itself

    @precondition(lambda self: self.prefilling())
    @rule(data=st.data(), chunk=st.integers(1, 16))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        row = data.draw(st.sampled_from(self.prefilling()))
        sequence = self.sequences[row]
        num_new = min(chunk, len(sequence.tokens) - self.computed(row))
        total = self.computed(row) + num_new
        ok = self.kv.allocate(row, num_new)
        assert ok == self.model.has_room(
            row, total, [], num_tokens=len(sequence.tokens), fit=False, reserved=0, watermark=False
        )
        if ok:
            self.model.grow(row, total)
            self.model.cache(row, sequence.salt, sequence.tokens[:total])
            self.rows.num_computed_tokens[row] = total

    def prefilling(self) -> list[int]:
        return [
            row for row, seq in self.sequences.items() if not seq.num_loading and self.computed(row) < len(seq.tokens)
        ]

    def can_decode(self) -> list[int]:
        return [
            row
            for row, seq in self.sequences.items()
            if not seq.num_loading
            and -1 <= self.computed(row) - len(seq.tokens) <= 0
            and self.computed(row) < MAX_MODEL_LEN
        ]

    @precondition(lambda self: self.can_decode())
    @rule(data=st.data())
    def plan_decode(self, data: st.DataObject) -> None:
        rows = data.draw(some_of(self.can_decode()))
        num_grown = 0
        for row in rows:
            slots = min(self.computed(row) + 1 + self.num_lookahead, MAX_MODEL_LEN)
            if self.model.num_needed(row, slots, []) > len(self.model.free_list):
                break
            self.model.grow(row, slots)
            num_grown += 1
        assert self.kv.allocate_decode(ints(rows)) == num_grown
        self.rows.num_computed_tokens[ints(rows[:num_grown])] += 1

    @precondition(lambda self: self.can_retire())
    @rule(data=st.data(), token=st.integers(0, 2))
    def retire(self, data: st.DataObject, token: int) -> None:
        rows = data.draw(some_of(self.can_retire()))
        self.rows.append(ints(rows), ints([token] * len(rows)))
        self.kv.cache_filled(ints(rows))
        for row in rows:
            sequence = self.sequences[row]
            sequence.tokens.append(token)
            self.model.cache(row, sequence.salt, sequence.tokens[: self.computed(row)])

    def can_retire(self) -> list[int]:
        return [
            row
            for row, seq in self.sequences.items()
            if not seq.num_loading and self.computed(row) >= len(seq.tokens) and len(seq.tokens) < MAX_MODEL_LEN
        ]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.sequences)))
        self.kv.free(row)
        self.model.release(self.model.pop(row))
        self.forget(row)

    @precondition(lambda self: self.sequences)
    @rule(target=popped, data=st.data())
    def pop(self, data: st.DataObject) -> list[int]:
        row = data.draw(st.sampled_from(sorted(self.sequences)))
        blocks = self.kv.pop_blocks_for_free(row)[0].tolist()
        assert blocks == self.model.pop(row)
        self.forget(row)
        return blocks

    @rule(blocks=consumes(popped))
    def release(self, blocks: list[int]) -> None:
        self.kv.release((ints(blocks),))
        self.model.release(blocks)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model.owners)), unique=True, max_size=3))
        self.kv.evict_blocks(ints(blocks))
        for block in blocks:
            self.model.uncache(block)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset_prefix_cache() == self.model.reset()

    def forget(self, row: int) -> None:
        self.rows.clear(row)
        self.worker.clear(row)
        del self.sequences[row]

    @invariant()
    def books_agree(self) -> None:
        self.kv.check_integrity()
        assert self.kv._pools.pools[0].queue.order().tolist() == self.model.free_list
        assert self.kv.num_free_blocks == len(self.model.free_list)
        assert self.kv.stats().num_keys == len(self.model.carriers)
        deltas = self.kv.take_deltas()
        self.worker.set(deltas.row, deltas.column, deltas.block_id)
        for row in range(MAX_ROWS):
            table = self.model.tables.get(row, [])
            assert self.kv.block_ids(row).tolist() == table
            assert self.worker.row(row).tolist() == table


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
