"""Plays short histories of requests on a ledger, so that its prefix cache gets into states that serving leads to."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from support.kv_configs import random_config
from support.kv_oracle import Cached, HitOracle, Prefix

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.groups import one_layer
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.spec import KVCacheConfig, MambaSpec
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

MAX_ROWS = 6
MAX_MODEL_LEN = 96


def ints(values: list[int]) -> Int32Array:
    return np.asarray(values, np.int32)


@dataclasses.dataclass
class Prompt:
    salt: str
    tokens: list[int]


def random_prompt(rng: random.Random) -> Prompt:
    """One of three beginnings, a part of it, and something of its own: prefixes are often shared."""
    base = rng.randrange(3)
    shared = [base] * rng.choice((rng.randint(0, 64), 16, 32, 48))
    own = [rng.randrange(2) for _ in range(rng.choice((0, 1, 3, 8, 20)))]
    salt = rng.choice(("", "", "", "tenant"))
    return Prompt(salt=salt, tokens=(shared + own)[: MAX_MODEL_LEN - 24] or [base])


def chunk_end(start: int, stop: int, state_blocks: list[int]) -> int:
    """Where a step may end that wants to reach stop: a running state that is inside a block may not leave it."""
    for block in state_blocks:
        if start % block:
            stop = min(stop, (start // block + 1) * block)
    return stop


class CacheHistory:
    """Requests come, compute, and go. Remembers what every hash stands for."""

    def __init__(self, config: KVCacheConfig, options: LedgerOptions, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.rows = RowTable(max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)
        self.kv = KVCacheManager(config, self.rows, options=options)
        self.oracle = HitOracle(config, num_hash_lookahead_tokens=options.num_hash_lookahead_tokens)
        self.running: dict[int, Prompt] = {}
        self.prompts: list[Prompt] = []
        self.meaning: dict[bytes, Prefix] = {}
        self.state_blocks = [
            spec.block_size
            for spec in (one_layer(group.spec) for group in config.groups)
            if isinstance(spec, MambaSpec)
        ]

    def play(self, num_requests: int) -> None:
        """Some requests, one after the other, whose blocks may stay while others come."""
        for _ in range(num_requests):
            prompt = self.rng.choice(self.prompts) if self.prompts and self.rng.random() < 0.3 else None
            self.serve(prompt or random_prompt(self.rng))
            if self.running and self.rng.random() < 0.6:
                self.end(self.rng.choice(sorted(self.running)))
            if self.rng.random() < 0.3:
                count = self.rng.randint(1, 1 + self.config.num_blocks // 6)
                self.kv.evict_blocks(ints(self.rng.sample(range(1, self.config.num_blocks), count)))
            self.kv.check_integrity()

    def serve(self, prompt: Prompt) -> None:
        """Prefill in chunks of any size, then decode a little. Ends early where the pool is full."""
        if len(self.running) == MAX_ROWS:
            self.end(min(self.running))
        self.prompts.append(prompt)
        row = next(row for row in range(MAX_ROWS) if row not in self.running)
        self.kv.start_step()
        self.rows.assign(row, ints(prompt.tokens), num_prompt_tokens=len(prompt.tokens))
        hashes = self.hashes(prompt)
        self.kv.start_row(row, hashes)
        self.running[row] = Prompt(salt=prompt.salt, tokens=list(prompt.tokens))
        hit = self.kv.lookup(hashes, len(prompt.tokens))
        computed, junction = hit.num_tokens, hit.junction
        options = AllocateOptions(hit=hit)
        while computed < len(prompt.tokens):
            stop = self.choose_stop(computed, len(prompt.tokens), junction)
            self.kv.start_step()
            if not self.kv.allocate(row, stop - computed, options):
                self.end(row)
                return
            options = AllocateOptions()
            computed = stop
            self.rows.num_computed_tokens[row] = computed
            self.kv.take_copies()
        for _ in range(self.rng.choice((0, 0, 1, 5, 20))):
            self.kv.start_step()
            if not self.decode(row):
                return

    def choose_stop(self, start: int, num_tokens: int, junction: int) -> int:
        """Any chunk, or one that ends where a state is worth keeping."""
        last = (num_tokens - 1) // self.config.hash_block_size * self.config.hash_block_size
        aligned = (num_tokens - 1) // self.oracle.alignment * self.oracle.alignment
        wishes = [stop for stop in (last, aligned, junction) if start < stop]
        stop = self.rng.choice((num_tokens, self.rng.randint(start + 1, num_tokens), *wishes))
        return chunk_end(start, stop, self.state_blocks)

    def decode(self, row: int) -> bool:
        if self.rows.num_tokens[row] >= MAX_MODEL_LEN or not self.kv.allocate_decode(ints([row])):
            return False
        token = self.rng.randrange(2)
        self.running[row].tokens.append(token)
        self.rows.append(ints([row]), ints([token]))
        self.rows.num_computed_tokens[row] += 1
        self.kv.cache_filled(ints([row]))
        self.kv.take_copies()
        return True

    def end(self, row: int) -> None:
        self.note(self.running[row])
        self.prompts.append(self.running.pop(row))
        self.kv.free(row)
        self.rows.clear(row)

    def hashes(self, prompt: Prompt) -> RequestHashes:
        """A new request's hashes."""
        return self.note(prompt)

    def note(self, prompt: Prompt) -> RequestHashes:
        hashes = self.kv.hash_prompt(ints(prompt.tokens), cache_salt=prompt.salt)
        for number, digest in enumerate(hashes.digests):
            end = (number + 1) * self.config.hash_block_size
            self.meaning[digest] = self.oracle.prefix(prompt.salt, prompt.tokens, end)
        return hashes

    def prefixes_of(self, block_id: int) -> set[tuple[int, Prefix]]:
        """What the ledger says a block is cached under."""
        report = self.kv.report_block(block_id)
        assert report.hash_group is not None or not report.hashes, report
        return {(report.hash_group or 0, self.meaning[digest]) for digest in report.hashes}

    def cached(self) -> Cached:
        """Everything that can be found."""
        for prompt in self.running.values():
            self.note(prompt)
        everything: Cached = set()
        for block_id in range(1, self.config.num_blocks):
            everything |= self.prefixes_of(block_id)
        return everything


def history_of(rng: random.Random) -> CacheHistory:
    config = random_config(rng)
    num_lookahead = rng.choice((0, 0, 0, 1, 3))
    history = CacheHistory(config, LedgerOptions(num_hash_lookahead_tokens=num_lookahead), rng)
    history.play(rng.randint(1, 7))
    return history


def questions(history: CacheHistory, rng: random.Random) -> list[Prompt]:
    """What was served, heads of it, continuations of it, and strangers."""
    asked = [*history.prompts, *history.running.values(), random_prompt(rng)]
    asked += [Prompt(salt=one.salt, tokens=one.tokens[: rng.randint(1, len(one.tokens))]) for one in asked]
    return asked + [Prompt(salt=one.salt, tokens=one.tokens + [0] * 9) for one in asked]
