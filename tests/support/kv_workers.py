"""The workers of one ledger: they get steps, keep block tables of their own, and run steps in order on a shadow.

Know nothing of the ledger but what they are told: table changes, blocks to clear, copies.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from support.kv_families import MAX_MODEL_LEN, Family
from support.kv_shadow import Prefixes, Shadow, Work

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.wire import BlockDeltas

Tables = tuple[list[int], ...]


@dataclasses.dataclass(eq=False)
class Request:
    """What a request is, and where it stands."""

    tokens: list[int]
    names: list[int]  # names[n]: of the first n tokens
    hashes: RequestHashes
    num_prompt_tokens: int
    row: int | None = None
    num_rows: int = 0  # that it has had
    num_in_flight: int = 0  # tokens of steps that have not run
    num_samples: int = 0  # tokens that will be known when they have
    num_loading: int = 0  # tokens, with those before them, that are still to arrive
    num_local: int = 0  # of those, found here
    has_drafts: bool = False  # in a step that has not run
    state_blocks: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a step: tokens [start, stop) of a request, the last num_drafts of them drafts."""

    request: Request
    num_rows: int
    start: int
    stop: int
    num_external: int = 0  # before start, arriving in this step
    num_drafts: int = 0
    are_drafts_counted: bool = False  # as computed by the scheduler, until they turn out wrong
    tables: tuple[list[int], ...] = ()  # when the step was put together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the workers get."""

    zeros: list[list[int]]
    copies: list[list[int]]
    parts: list[Part]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a part of a step came to."""

    part: Part
    num_accepted: int  # of its drafts


class Workers:
    """Block tables, pages, and the steps that have not run."""

    def __init__(self, family: Family, *, max_rows: int) -> None:
        self.prefixes = Prefixes()
        self.shadow = Shadow(
            family.config, self.prefixes, num_hash_lookahead_tokens=family.options.num_hash_lookahead_tokens
        )
        self.mirrors = [BlockTable(max_rows=max_rows, max_blocks=MAX_MODEL_LEN + 8) for _ in family.groups]
        self.steps: collections.deque[Step] = collections.deque()

    def make_request(self, tokens: list[int], salt: str, hashes: RequestHashes) -> Request:
        """A request of which nothing is computed."""
        request = Request([], [self.prefixes.root(salt)], hashes, num_prompt_tokens=len(tokens))
        for token in tokens:
            self.extend(request, token)
        return request

    def extend(self, request: Request, token: int) -> None:
        """One more token is known."""
        request.tokens.append(token)
        request.names.append(self.prefixes.next(request.names[-1], token))

    # tables

    def update_tables(self, deltas: BlockDeltas) -> None:
        """Apply what has changed since the last time."""
        for group, mirror in enumerate(self.mirrors):
            mine = deltas.group == group
            mirror.set(deltas.row[mine], deltas.column[mine], deltas.block_id[mine])

    def check_tables(self, row: int, tables: list[list[int]]) -> Tables:
        """The ledger's tables of a row, which must be known here, but for what the ledger has taken away."""
        for mirror, table in zip(self.mirrors, tables, strict=True):
            known = mirror.block_ids[row, : len(table)].tolist()
            assert all(block_id in {0, mine} for block_id, mine in zip(table, known, strict=True)), (table, known)
        return tuple(tables)

    def forget(self, row: int) -> None:
        """A row has ended."""
        for mirror in self.mirrors:
            mirror.clear(row)

    # content

    def run_oldest(self, rng: random.Random) -> list[Outcome]:
        """Run a step: clear, copy, load, compute, sample; drafts are accepted as rng likes."""
        step = self.steps.popleft()
        for group, block_id in step.zeros:
            self.shadow.clear(group, block_id)
        for group, source, target in step.copies:
            self.shadow.copy(group, source, target)
        outcomes = [Outcome(part=part, num_accepted=rng.randint(0, part.num_drafts)) for part in step.parts]
        works = []
        for outcome in outcomes:
            request, part = outcome.part.request, outcome.part
            if part.stop - part.num_drafts == len(request.tokens):
                for _ in range(outcome.num_accepted + 1):
                    self.extend(request, rng.randrange(2))
            work = self.work_of(outcome)
            if part.num_external:
                start = part.start - part.num_external
                self.shadow.load(dataclasses.replace(work, start=start, stop=part.start))
            works.append(work)
        for outcome, blocks in zip(outcomes, self.shadow.compute(works), strict=True):
            if outcome.part.request.num_rows == outcome.part.num_rows:
                outcome.part.request.state_blocks = blocks
        return outcomes

    def work_of(self, outcome: Outcome) -> Work:
        request, part = outcome.part.request, outcome.part
        return Work(
            names=request.names,
            num_prompt_tokens=request.num_prompt_tokens,
            tables=part.tables,
            start=part.start,
            stop=part.stop,
            state_blocks=tuple(request.state_blocks.get(group) for group in range(len(part.tables))),
            num_rejected=part.num_drafts - outcome.num_accepted,
            num_drafts=part.num_drafts,
        )

    def load(self, request: Request, tables: Tables, *, is_garbage: bool) -> None:
        """What was awaited arrives, or something else does."""
        self.shadow.load(
            Work(
                names=[0] * (len(request.names) + 1) if is_garbage else request.names,
                num_prompt_tokens=request.num_prompt_tokens,
                tables=tables,
                start=request.num_local,
                stop=request.num_loading,
                state_blocks=(),
            )
        )
