"""A scheduler that does anything a real one may do, on a ledger of any family, and checks everything it is told.

Two witnesses that know nothing of each other: books (which columns hold blocks, who owns which block) and a shadow
(what is in the blocks). Every choice comes from one random.Random.
"""

from __future__ import annotations

import collections
import dataclasses
import random

import numpy as np
from support.kv_accounts import is_dense
from support.kv_books import Books
from support.kv_families import MAX_ENCODER_TOKENS, MAX_MODEL_LEN, Family
from support.kv_workers import Part, Request, Step, Workers

from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

MAX_ROWS = 6
MAX_STEPS_IN_FLIGHT = 2


def ints(values: list[int]) -> Int32Array:
    return np.asarray(values, np.int32)


class Player:
    """Plays one ledger. Every public method is one thing that may happen; each can be called at any time."""

    def __init__(self, family: Family, rng: random.Random) -> None:
        self.rng = rng
        self.family = family
        self.options = family.options
        self.rows = RowTable(max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)
        events = EventLog() if family.has_events else None
        self.kv = KVCacheManager(family.config, self.rows, options=family.options, events=events)
        self.books = Books(self.kv, family)
        self.workers = Workers(family, max_rows=MAX_ROWS)
        self.heard: list[list[int]] = []  # every prompt so far
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.open: list[Part] = []
        self.is_step_open = False
        self.counts_drafts = rng.random() < 0.5
        self.counts: collections.Counter[str] = collections.Counter()

    # requests come

    def add(self) -> None:
        """A request, often with a known beginning."""
        base = self.rng.randrange(3)
        shared = [base] * self.rng.choice((self.rng.randint(0, 40), 16, 32))
        own = [self.rng.randrange(2) for _ in range(self.rng.choice((0, 1, 4, 12)))]
        tokens, salt = (shared + own) or [base], self.rng.choice(("", "", "", "tenant"))
        if self.heard and self.rng.random() < 0.4:
            tokens = self.rng.choice(self.heard) + [self.rng.randrange(2) for _ in range(self.rng.choice((0, 1, 5)))]
        tokens = tokens[: MAX_MODEL_LEN - 8]
        self.heard.append(tokens)
        hashes = self.kv.hash_prompt(ints(tokens), cache_salt=salt)
        self.waiting.append(self.workers.make_request(tokens, salt, hashes))

    def admit(self) -> None:
        """A waiting request gets a row, if there is room for it."""
        free_rows = [row for row in range(MAX_ROWS) if row not in self.running]
        if not self.waiting or not free_rows:
            return
        request, row = self.rng.choice(self.waiting), self.rng.choice(free_rows)
        self.waiting.remove(request)
        if len(request.tokens) > MAX_MODEL_LEN - 8:
            return
        self.begin_step()
        if self.options.enable_caching:
            request.hashes.extend(ints(request.tokens))
        hit = self.kv.lookup(request.hashes, len(request.tokens))
        self.rows.assign(row, ints(request.tokens), num_prompt_tokens=request.num_prompt_tokens)
        self.kv.start_row(row, request.hashes)
        self.books.open_row(row, num_prompt_tokens=request.num_prompt_tokens)
        request.row, request.num_rows, request.state_blocks = row, request.num_rows + 1, {}
        self.running[row] = request
        if not self.place(request, row, hit):
            self.kv.free(row)
            self.leave(request)
            self.waiting.append(request)

    def place(self, request: Request, row: int, hit: PrefixHit) -> bool:
        """A row's first allocation, with everything that can come with one."""
        known = len(request.tokens)
        rest = known - 1 - hit.num_tokens
        num_external = self.rng.randint(1, rest) if rest > 0 and self.rng.random() < 0.3 else 0
        start = hit.num_tokens + num_external
        is_delayed = num_external > 0 and self.rng.random() < 0.6
        stop = start if is_delayed else self.chunk_stop(start, known, hit.junction)
        options = AllocateOptions(
            hit=hit,
            num_external_tokens=num_external,
            num_lookahead_tokens=self.rng.choice((0, self.options.num_lookahead_tokens)),
            num_encoder_tokens=self.rng.randint(0, MAX_ENCODER_TOKENS) if self.options.max_num_encoder_tokens else 0,
            delay_caching=is_delayed,
            full_sequence_must_fit=self.rng.random() < 0.3,
            num_reserved_blocks=self.rng.choice((0, 0, 0, 3)),
            apply_watermark=self.rng.random() < 0.3,
        )
        ask = self.books.ask(0, hit.num_tokens, stop - start, options)
        forecast = self.books.first(row, ask, hit, options, num_tokens=known)
        before = self.kv.num_free_blocks, self.kv.stats().num_keys
        if not self.kv.allocate(row, stop - start, options):
            assert (self.kv.num_free_blocks, self.kv.stats().num_keys) == before
            assert not forecast.must or self.is_deferred(hit), (ask, options)
            self.counts["refused"] += 1
            return False
        assert forecast.may, (ask, options)
        self.books.accounts[row] = forecast.accounts
        self.books.note_new(row, [[] for _ in self.books.specs], hit)
        self.counts["hits"] += hit.num_tokens > 0
        self.counts["hits inside a block"] += any(hit.num_tokens % account.block for account in forecast.accounts)
        self.counts["external"] += num_external > 0
        if is_delayed:
            request.num_loading, request.num_local = start, hit.num_tokens
        else:
            self.schedule(row, Part(request=request, num_rows=0, start=start, stop=stop, num_external=num_external))
        return True

    def is_deferred(self, hit: PrefixHit) -> bool:
        """Whether the hit may be on a state that is only computed in the step being put together."""
        states = [number for number, spec in enumerate(self.books.specs) if spec.tokens_per_state > 1]
        return any(len(hit.block_ids[number]) for number in states) and bool(self.open)

    # requests go on

    def prefill(self) -> None:
        """A chunk of a prompt, or of what is computed again."""
        rows = [
            row
            for row in self.free_to_plan()
            if self.computed(row) < min(len(self.running[row].tokens), MAX_MODEL_LEN - 4)
        ]
        if not rows:
            return
        row = self.rng.choice(rows)
        request, start = self.running[row], self.computed(row)
        stop = self.chunk_stop(start, len(request.tokens), 0)
        self.grow(row, Part(request=request, num_rows=0, start=start, stop=stop))

    def verify(self) -> None:
        """Decode one row by a call of its own; in half of the histories drafts are new tokens, else lookahead only."""
        rows = [row for row in self.decoding() if not self.running[row].num_in_flight]
        if not rows:
            return
        row = self.rng.choice(rows)
        num_drafts = self.rng.randint(0, self.options.num_lookahead_tokens) if self.counts_drafts else 0
        start = self.computed(row)
        part = Part(
            request=self.running[row],
            num_rows=0,
            start=start,
            stop=start + 1 + num_drafts,
            num_drafts=num_drafts,
            are_drafts_counted=True,
        )
        self.grow(row, part)

    def grow(self, row: int, part: Part) -> None:
        """A later allocation of one row."""
        self.begin_step()
        options = AllocateOptions(
            num_in_flight_tokens=self.rng.choice((0, part.request.num_in_flight)),
            num_lookahead_tokens=self.rng.choice((0, self.options.num_lookahead_tokens)),
            num_reserved_blocks=self.rng.choice((0, 0, 0, 2)),
        )
        before = self.books.tables(row)
        num_free, num_held = self.kv.num_free_blocks, len(self.books.held())
        is_exact = not self.books.places.has_slabs  # what is free of slabs is not counted in blocks
        self.books.skip(row, part.start - options.num_in_flight_tokens)
        ask = self.books.ask(part.start, 0, part.stop - part.start, options)
        is_served = self.kv.allocate(row, part.stop - part.start, options)
        if not is_served:
            assert not is_exact or self.kv.num_free_blocks - num_free == num_held - len(self.books.held())
            assert not self.books.further(row, ask, options).must, (ask, options)
            self.counts["refused"] += 1
            return
        assert not is_exact or self.kv.num_free_blocks >= options.num_reserved_blocks
        self.books.accounts[row] = self.books.further(row, ask, options).accounts
        self.books.note_new(row, before)
        self.schedule(row, part)

    def decode(self) -> None:
        """One token more of some rows, in one call."""
        rows = self.decoding()
        if not rows:
            return
        rows = self.rng.sample(rows, self.rng.choice((len(rows), self.rng.randint(1, len(rows)))))
        self.begin_step()
        before = {row: self.books.tables(row) for row in rows}
        num_served = self.kv.allocate_decode(ints(rows))
        lookahead = AllocateOptions(num_lookahead_tokens=self.options.num_lookahead_tokens)
        for row in rows:
            self.books.skip(row, self.computed(row))
        for row in rows[:num_served]:
            ask = self.books.ask(self.computed(row), 0, 1, lookahead)
            self.books.accounts[row] = self.books.further(row, ask, lookahead).accounts
            self.books.note_new(row, before[row])
        if num_served < len(rows):
            self.counts["refused"] += 1
            ask = self.books.ask(self.computed(rows[num_served]), 0, 1, lookahead)
            assert not self.books.further(rows[num_served], ask, lookahead).must, ask
        for row in rows[:num_served]:
            start, request = self.computed(row), self.running[row]
            most = 0 if request.num_in_flight or self.counts_drafts else self.options.num_lookahead_tokens
            num_drafts = self.rng.randint(0, most)
            self.schedule(
                row,
                Part(request=request, num_rows=0, start=start, stop=start + 1 + num_drafts, num_drafts=num_drafts),
            )

    # steps

    def begin_step(self) -> None:
        if not self.is_step_open:
            self.kv.start_step()
            self.is_step_open = True

    def schedule(self, row: int, part: Part) -> None:
        """Count a part's tokens as computed and make it part of the step."""
        request = part.request
        num_main = part.stop - (0 if part.are_drafts_counted else part.num_drafts)
        self.rows.num_computed_tokens[row] = num_main
        request.num_in_flight += num_main - part.start
        request.num_samples += part.stop - part.num_drafts >= len(request.tokens) + request.num_samples
        request.has_drafts = part.num_drafts > 0
        self.open.append(dataclasses.replace(part, num_rows=request.num_rows))

    def dispatch(self) -> None:
        """The step is complete: the workers get it, and run the oldest they have when they have too many."""
        zeros = self.kv.take_zero().tolist()
        missing = self.books.zero_due - {(group, block_id) for group, block_id in zeros}
        assert not missing, (missing, zeros)
        self.books.zero_due.clear()
        self.workers.update_tables(self.kv.take_deltas())
        copies = self.kv.take_copies().tolist()
        self.counts["copies"] += len(copies)
        parts = [dataclasses.replace(part, tables=self.tables_of(part.request)) for part in self.open]
        self.workers.steps.append(Step(zeros=zeros, copies=copies, parts=parts))
        self.open, self.is_step_open = [], False
        while len(self.workers.steps) > MAX_STEPS_IN_FLIGHT:
            self.retire()

    def tables_of(self, request: Request) -> tuple[list[int], ...]:
        assert request.row is not None, request
        return self.workers.check_tables(request.row, self.books.tables(request.row))

    def retire(self) -> None:
        """Workers run their oldest step; samples become known and full blocks findable."""
        if self.workers.steps:
            for outcome in self.workers.run_oldest(self.rng):
                self.settle(outcome.part, outcome.num_accepted)

    def settle(self, part: Part, num_accepted: int) -> None:
        """Tell the ledger what a part of a step came to, unless its row has ended."""
        request = part.request
        row = request.row
        if row is None or request.num_rows != part.num_rows:
            return
        request.num_in_flight -= part.stop - part.start - (0 if part.are_drafts_counted else part.num_drafts)
        request.has_drafts = False
        num_wrong = part.num_drafts - num_accepted
        self.rows.num_computed_tokens[row] += -num_wrong if part.are_drafts_counted else num_accepted
        num_known = int(self.rows.num_tokens[row])
        for token in request.tokens[num_known:]:
            self.rows.append(ints([row]), ints([token]))
        if num_known < len(request.tokens):
            request.num_samples -= 1
            if self.rng.random() < 0.8:
                self.kv.cache_filled(ints([row]))
            else:
                self.kv.cache_prefix(row)

    # transfers

    def end_load(self) -> None:
        """Tokens that were awaited have arrived, or will never."""
        rows = [row for row, request in self.running.items() if request.num_loading]
        if not rows:
            return
        self.run_everything()
        row = self.rng.choice(rows)
        request = self.running[row]
        has_arrived = self.rng.random() < 0.6
        self.workers.load(request, self.tables_of(request), is_garbage=not has_arrived)
        start, stop = request.num_local, request.num_loading
        request.num_loading = 0
        self.counts["loads"] += 1
        if has_arrived:
            self.rows.num_computed_tokens[row] = stop
            self.kv.cache_prefix(row)
        elif all(is_dense(spec) for spec in self.books.specs):
            self.rows.num_computed_tokens[row] = start
        else:  # what a hit brought may be out of reach of the tokens that did not come: begin again
            self.kv.free(row)
            self.leave(request)
            self.waiting.append(request)

    def run_everything(self) -> None:
        """No step is open or in flight any more."""
        self.dispatch()
        while self.workers.steps:
            self.retire()

    # requests go

    def preempt(self) -> None:
        """A row gives everything back and waits."""
        rows = [row for row in self.free_to_plan() if not self.running[row].num_in_flight]
        if rows:
            row = self.rng.choice(rows)
            request = self.running[row]
            self.kv.free(row)
            self.leave(request)
            self.waiting.append(request)

    def abort(self) -> None:
        """A row ends, whatever of it is in flight."""
        rows = [row for row in self.running if not self.is_in_open_step(row)]
        if rows:
            row = self.rng.choice(rows)
            self.kv.free(row)
            self.leave(self.running[row])

    def pop(self) -> None:
        """A row ends, but somebody still reads its blocks."""
        rows = [row for row in self.running if not self.is_in_open_step(row)]
        if rows:
            row = self.rng.choice(rows)
            tables = self.books.tables(row)
            popped = self.kv.pop_blocks_for_free(row)
            assert [block_ids.tolist() for block_ids in popped] == [
                [block_id for block_id in table if block_id] for table in tables
            ]
            self.leave(self.running[row])
            self.books.popped.append(popped)

    def release(self) -> None:
        """The reader is done."""
        if self.books.popped:
            self.kv.release(self.books.popped.pop(self.rng.randrange(len(self.books.popped))))

    # the cache shrinks

    def evict(self) -> None:
        """Some blocks turn out wrong."""
        group = self.rng.randrange(len(self.books.specs))
        block_ids = self.rng.sample(range(1, self.books.places.num_pages(group) + 1), self.rng.randint(1, 4))
        self.kv.evict_blocks(ints(block_ids), group)
        self.books.evicted |= {self.books.places.of(group, block_id) for block_id in block_ids}

    def reset(self) -> None:
        """The cache is emptied, if nothing is in use."""
        self.run_everything()
        is_unused = not self.books.held()
        assert self.kv.reset_prefix_cache() == is_unused
        if is_unused:
            assert self.kv.stats().num_keys == 0

    def finish(self) -> None:
        """Everything ends; then every block is free."""
        self.run_everything()
        for row in list(self.running):
            self.kv.free(row)
            self.leave(self.running[row])
        while self.books.popped:
            self.release()
        self.books.check()
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks

    # of the above

    def leave(self, request: Request) -> None:
        """A row's end, except for the ledger."""
        row = request.row
        assert row is not None, request
        self.rows.clear(row)
        del self.running[row], self.books.accounts[row]
        self.workers.forget(row)
        request.row = None
        request.num_in_flight = request.num_samples = request.num_loading = 0
        request.has_drafts = False

    def computed(self, row: int) -> int:
        return int(self.rows.num_computed_tokens[row])

    def is_in_open_step(self, row: int) -> bool:
        return any(part.request.row == row for part in self.open)

    def free_to_plan(self) -> list[int]:
        """Rows that nothing has to be waited for, and that are not part of the step yet."""
        return [
            row
            for row, request in sorted(self.running.items())
            if not request.num_loading and not request.has_drafts and not self.is_in_open_step(row)
        ]

    def decoding(self) -> list[int]:
        """Rows whose next token is the last one known, or about to be."""
        return [
            row
            for row in self.free_to_plan()
            if self.computed(row) == len(self.running[row].tokens) + self.running[row].num_samples - 1
            and self.computed(row) < MAX_MODEL_LEN - 4
        ]

    def chunk_stop(self, start: int, known: int, junction: int) -> int:
        """Any chunk, or one that ends where a state is worth keeping; a state inside a block does not leave it."""
        last = (known - 1) // self.family.hash_block_size * self.family.hash_block_size
        wishes = [stop for stop in (last, last, junction) if start < stop]
        stop = self.rng.choice((known, known, self.rng.randint(start + 1, known), *wishes))
        for block in self.books.state_blocks:
            if start % block:
                stop = min(stop, (start // block + 1) * block)
        return stop
