"""Drafts of one instance's rows: what was proposed, what of it is worth verifying, and what came of it.

Owns the per-row draft arrays and the counters. Decides no tokens and takes no blocks: the model confirms drafts, the
scheduler makes room for them (schedule.py), a step's result says how many held (new_tokens.py).

    result of a step                        next plan of the row                        its result
    proposals, clipped to what -----------> verified behind the last token, as far ---> learned from, and replaced by
    pays and to the row's limit             as budget and blocks go; else dropped       the proposals that came with it

How many tokens a step yields a row is known with its result only, so no decode row is planned while a step that
decodes is in flight: every decode row waits for it, so that all go on together rather than in turns of half a batch.
Prefills are planned meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.config import SpeculationConfig
from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.draft_length import DraftLengths, IndexArray, make_draft_lengths
from blockferry.engine.scheduler.new_tokens import Drawn
from blockferry.engine.scheduler.sequence import Sequence, Ticket

if TYPE_CHECKING:
    from blockferry.engine.scheduler.instance import StepRecord

NO_DRAFTS: Int32Array = np.empty(0, np.int32)
_DRAFTED = np.int64(1 << 32)  # two counts in one number: half the cost of two
_NO_ROWS: Int32Array = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounters:
    """Since the instance began. Index 0 of a position is a row's first draft of a step."""

    num_steps: int  # of the instance, that verified any draft
    drafted_per_position: tuple[int, ...]  # [0]: how often a row had any verified
    accepted_per_position: tuple[int, ...]

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted(self) -> int:
        """Drafts that the model confirmed."""
        return sum(self.accepted_per_position)


class Speculation(Protocol):
    """What an instance does about drafts. Called by the thread that owns the instance."""

    def ready(self, rows: Int32Array, in_flight: Collection[StepRecord]) -> Int32Array:
        """Those of decode rows that may be planned now, while these steps are in flight."""

    def choose(self, rows: Int32Array, *, num_budget_tokens: int) -> Int32Array:
        """Drafts to verify of each of rows [R], within a token budget, the first rows first; empty: none of any."""

    def gather(self, rows: Int32Array, num_drafts: Int32Array) -> Int32Array:
        """The first num_drafts [R] drafts of rows [R], row by row, [sum(num_drafts)]."""

    def num_proposals(self, rows: Int32Array) -> int:
        """Most drafts that any of rows will want after the step that is being planned."""

    def learn(self, drawn: Drawn, num_tokens: Int32Array, has_blocks: BoolArray | None) -> None:
        """Keep what a step proposed for rows that are in use, and note what of their drafts it confirmed.

        num_tokens: that each has by now, [R]. has_blocks: False for rows that were preempted meanwhile; None: none was.
        """

    def start(self, row: int, sequence: Sequence) -> None:
        """A sequence begins on a row, whose tokens are assigned."""

    def adopt(self, row: int, draft_token_ids: Int32Array) -> None:
        """Another instance proposed drafts [n] that may follow the row's last token."""

    def proposed(self, row: int) -> Int32Array:
        """Drafts that may follow the row's last token, for another instance; a copy."""

    def forget(self, row: int, ticket: Ticket) -> None:
        """The row lost its blocks, or its sequence: its drafts go; its counts go to the ticket."""

    def num_kept(self, row: int) -> int:
        """Drafts that the row has, or had when the step was planned that it has in flight."""

    def counters(self) -> SpeculationCounters | None:
        """For status and metrics; None where nothing is ever drafted."""


class NoSpeculation:
    """An instance whose rows get one token per step."""

    def ready(self, rows: Int32Array, in_flight: Collection[StepRecord]) -> Int32Array:
        """All: what a step in flight yields is not needed to plan the next."""
        del in_flight
        return rows

    def choose(self, rows: Int32Array, *, num_budget_tokens: int) -> Int32Array:
        """None."""
        del rows, num_budget_tokens
        return NO_DRAFTS

    def gather(self, rows: Int32Array, num_drafts: Int32Array) -> Int32Array:
        """None."""
        del rows, num_drafts
        return NO_DRAFTS

    def num_proposals(self, rows: Int32Array) -> int:
        """None."""
        del rows
        return 0

    def learn(self, drawn: Drawn, num_tokens: Int32Array, has_blocks: BoolArray | None) -> None:
        """Nothing was drafted."""

    def start(self, row: int, sequence: Sequence) -> None:
        """Nothing to begin."""

    def adopt(self, row: int, draft_token_ids: Int32Array) -> None:
        """Of no use here."""

    def proposed(self, row: int) -> Int32Array:
        """None."""
        del row
        return NO_DRAFTS

    def forget(self, row: int, ticket: Ticket) -> None:
        """Nothing to forget."""

    def num_kept(self, row: int) -> int:
        """None."""
        del row
        return 0

    def counters(self) -> None:
        """Nothing to show."""
        return


NO_SPECULATION = NoSpeculation()


class RowDrafts:
    """Drafts of all rows of an instance that speculates. Mutated by that instance's scheduler only."""

    def __init__(self, config: SpeculationConfig, rows: RowTable) -> None:
        """Raises ValueError where nothing could be drafted."""
        if config.num_tokens < 1:
            raise ValueError(
                f"speculation.num_tokens={config.num_tokens} drafts nothing; use 1 or more, or no speculation"
            )
        self._table = rows
        self._most = config.num_tokens
        self._lengths: DraftLengths = make_draft_lengths(config, max_rows=rows.max_rows)
        self._token_ids: NDArray[np.int32] = np.zeros((rows.max_rows, config.num_tokens), np.int32)
        # the same, a row's drafts as one value of bytes: a view that is written and read five times as fast
        self._packed_ids = self._token_ids.view(f"V{4 * config.num_tokens}").reshape(-1)
        # by count: which of a row's drafts are the first ones, bools as one value of bytes; [num_tokens + 1]
        self._leading = (
            np.tri(config.num_tokens + 1, config.num_tokens, -1, np.bool_).view(f"V{config.num_tokens}").ravel()
        )
        self._counts: Int32Array = np.zeros(rows.max_rows, np.int32)  # drafts worth verifying
        self._wanted: Int32Array = np.zeros(rows.max_rows, np.int32)  # to be proposed with the row's next token
        self._limit: Int32Array = np.zeros(rows.max_rows, np.int32)  # tokens that the row may have, drafts included
        # of the sequence since it is on the row: drafts accepted, and times _DRAFTED those verified
        self._verified: Int64Array = np.zeros(rows.max_rows, np.int64)
        self._num_steps = 0
        # how often a row had d drafts verified and a of them accepted: [d * base + a]
        self._base = np.int32(config.num_tokens + 1)
        self._outcomes: Int64Array = np.zeros((config.num_tokens + 1) ** 2, np.int64)

    # planning

    def ready(self, rows: Int32Array, in_flight: Collection[StepRecord]) -> Int32Array:
        """None while a step that decodes is in flight, then those whose first token has arrived."""
        if not in_flight:
            return rows
        if any(record.is_decoding for record in in_flight):
            return _NO_ROWS
        is_known = self._table.num_computed_tokens.take(rows) < self._table.num_tokens.take(rows)
        return rows if np.count_nonzero(is_known) == len(rows) else rows[is_known]

    def choose(self, rows: Int32Array, *, num_budget_tokens: int) -> Int32Array:
        """See Speculation."""
        counts = self._counts.take(rows)
        num_drafts = int(np.add.reduce(counts))
        if num_drafts > num_budget_tokens:
            before = np.cumsum(counts, dtype=np.int32) - counts
            np.minimum(counts, np.maximum(np.int32(num_budget_tokens) - before, 0), out=counts)
            num_drafts = max(0, num_budget_tokens)
        return counts if num_drafts else NO_DRAFTS

    def gather(self, rows: Int32Array, num_drafts: Int32Array) -> Int32Array:
        """See Speculation."""
        if not len(num_drafts):
            return NO_DRAFTS
        token_ids: Int32Array = self._packed_ids.take(rows).view(np.int32)
        if num_drafts.min() == self._most:
            return token_ids
        return token_ids.compress(self._leading.take(num_drafts).view(np.bool_))

    def num_proposals(self, rows: Int32Array) -> int:
        """See Speculation."""
        return int(np.maximum.reduce(self._wanted.take(rows), initial=0))

    # results

    def learn(self, drawn: Drawn, num_tokens: Int32Array, has_blocks: BoolArray | None) -> None:
        """See Speculation."""
        rows = drawn.view.rows.astype(np.intp)  # the type that indexing converts to, once for all of it
        if len(drawn.num_drafts):
            self._note(rows, drawn.num_drafts, drawn.counts)
        num_proposed = self._keep(rows, drawn.proposals)
        if has_blocks is not None:
            num_proposed *= has_blocks
        self._renew(rows, num_tokens, num_proposed)

    def start(self, row: int, sequence: Sequence) -> None:
        """See Speculation. What a ferried sequence's last step proposes is verified elsewhere, up to the same end."""
        self._limit[row] = self._table.max_model_len if sequence.is_ferried else sequence.limit
        self._lengths.start(row)
        self._renew_row(row, num_proposed=0)

    def adopt(self, row: int, draft_token_ids: Int32Array) -> None:
        """See Speculation."""
        drafts = draft_token_ids[: self._most]
        self._token_ids[row, : len(drafts)] = drafts
        self._renew_row(row, num_proposed=len(drafts))

    def proposed(self, row: int) -> Int32Array:
        """See Speculation."""
        return self._token_ids[row, : self._counts[row]].copy()

    def forget(self, row: int, ticket: Ticket) -> None:
        """See Speculation."""
        num_drafted, num_accepted = divmod(int(self._verified[row]), int(_DRAFTED))
        ticket.num_drafted_tokens += num_drafted
        ticket.num_accepted_tokens += num_accepted
        self._verified[row] = self._counts[row] = self._wanted[row] = 0

    # reports

    def num_kept(self, row: int) -> int:
        """See Speculation."""
        return int(self._counts[row])

    def counters(self) -> SpeculationCounters:
        """See Speculation."""
        outcomes = self._outcomes.reshape(self._base, self._base)
        return SpeculationCounters(
            num_steps=self._num_steps,
            drafted_per_position=_at_least(outcomes.sum(axis=1)),
            accepted_per_position=_at_least(outcomes.sum(axis=0)),
        )

    # steps of the above

    def _note(self, rows: IndexArray, num_drafts: Int32Array, counts: Int32Array) -> None:
        num_accepted = counts - np.int32(1) if len(counts) else np.zeros(len(rows), np.int32)
        self._num_steps += 1
        self._outcomes += np.bincount(num_drafts * self._base + num_accepted, minlength=len(self._outcomes))
        self._verified[rows] += num_drafts * _DRAFTED + num_accepted
        self._lengths.learn(rows, num_drafts, num_accepted)

    def _keep(self, rows: IndexArray, proposals: NDArray[np.int32]) -> Int32Array:
        """Store proposals [R, K] and return how many drafts each row got."""
        if not proposals.size:
            return np.zeros(len(rows), np.int32)
        num_columns = proposals.shape[1]
        if num_columns == self._most:
            self._packed_ids[rows] = np.ascontiguousarray(proposals).view(self._packed_ids.dtype).ravel()
        else:
            self._token_ids[rows, :num_columns] = proposals
        num_proposed = np.full(len(rows), num_columns, np.int32)
        if proposals.min() < 0:
            for place in range(num_columns):
                num_proposed -= proposals[:, place] < 0
        return num_proposed

    def _renew_row(self, row: int, *, num_proposed: int) -> None:
        rows = np.array([row])
        self._renew(rows, self._table.num_tokens.take(rows), np.array([num_proposed], np.int32))

    def _renew(self, rows: IndexArray, num_tokens: Int32Array, num_proposed: Int32Array) -> None:
        """What rows have that is worth verifying after their last token, and what they will want after the next."""
        # a step yields one token more than drafts
        room = self._limit.take(rows) - num_tokens - np.int32(1)
        now, then = self._lengths.wanted(rows, num_tokens)
        np.minimum(now, room, out=now)
        np.minimum(now, num_proposed, out=now)
        self._counts[rows] = np.maximum(now, 0, out=now)
        self._wanted[rows] = np.minimum(then, room - np.int32(1), out=then)


def make_speculation(config: SpeculationConfig | None, rows: RowTable) -> Speculation:
    """What an instance with these rows does about drafts. Raises ValueError where nothing could be drafted."""
    return NO_SPECULATION if config is None else RowDrafts(config, rows)


def _at_least(histogram: Int64Array) -> tuple[int, ...]:
    """How often a count was at least 1, 2, ...; from how often it was 0, 1, 2, ...."""
    return tuple(np.cumsum(histogram[::-1])[::-1][1:].tolist())
