"""Drives a worker through steps that verify drafts, for any family: every row has all its blocks from the start.

Drafts come from whoever a test names; with none, the same steps yield one token each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import SamplingParams, TokenLogprobs
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan, StepResult, pack, plan_from_bytes, result_from_bytes
from blockferry.engine.worker.worker import Worker

Drafts = Callable[[int, list[int]], list[int]]
"""Of a prompt's number and the tokens known so far: what may follow."""


def no_drafts(number: int, known: list[int]) -> list[int]:
    del number, known
    return []


@dataclasses.dataclass
class Generated:
    """What came of one prompt."""

    row: int
    known: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    logprob_positions: list[int] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)  # tokens that each step yielded
    proposals: list[list[int]] = dataclasses.field(default_factory=list)  # after each of them

    @property
    def output(self) -> list[int]:
        return self.known[self.num_prompt_tokens :]


def all_blocks(ledger: KVCacheConfig, rows: Sequence[int], num_tokens: int) -> BlockDeltas:
    """Blocks of every group for so many tokens of each row, none twice. Of a pool without slabs."""
    assert ledger.slab is None, "in slabs, blocks of different groups may lie in the same bytes"
    deltas, last_id = [], 0
    for row in rows:
        for group, kv_group in enumerate(ledger.groups):
            for column in range(kv_group.spec.num_blocks_for(num_tokens)):
                last_id += 1
                deltas.append((group, row, column, last_id))
    assert last_id < ledger.num_blocks, (last_id, ledger.num_blocks)
    columns = np.array(deltas, np.int32).T
    return BlockDeltas(group=columns[0], row=columns[1], column=columns[2], block_id=columns[3])


class DraftDriver:
    """Runs prompts together on one worker; call run() once per worker, or with rows that are free."""

    def __init__(self, worker: Worker, ledger: KVCacheConfig, *, chunk: int, num_proposals: int = 0) -> None:
        self.plans: list[StepPlan] = []
        self._worker = worker
        self._ledger = ledger
        self._chunk = chunk
        self._num_proposals = num_proposals
        self._freed: list[int] = []

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        drafts: Drafts = no_drafts,
        *,
        num_output: int,
    ) -> list[Generated]:
        """Continue every prompt by num_output tokens; steps mix prompts' chunks, plain and verifying rows."""
        rows = list(reversed(range(len(prompts))))
        made = [
            Generated(row=row, known=list(prompt), num_prompt_tokens=len(prompt), sampling=sampling)
            for row, prompt, sampling in zip(rows, prompts, samplings, strict=True)
        ]
        longest = max(len(prompt) for prompt in prompts) + num_output
        new_rows, deltas = tuple(map(_new_row, made)), all_blocks(self._ledger, rows, longest)
        while active := [one for one in made if len(one.output) < num_output]:
            chosen = [self._choose(made.index(one), one, num_output, drafts) for one in active]
            plan = self._plan(active, chosen, new_rows, deltas)
            new_rows, deltas = (), NO_CHANGES
            self._commit(active, chosen, plan)
        self._execute(StepPlan(step_id=0, freed_rows=np.array(rows, np.int32)))
        return made

    def _choose(self, number: int, one: Generated, num_output: int, drafts: Drafts) -> list[int]:
        """The drafts of a row in this step."""
        if len(one.known) - one.num_computed > 1:
            return []
        room = num_output - len(one.output) - 1
        return drafts(number, list(one.known))[:room]

    def _plan(
        self, active: list[Generated], chosen: list[list[int]], new_rows: tuple[NewRow, ...], deltas: BlockDeltas
    ) -> StepPlan:
        known = [min(self._chunk, len(one.known) - one.num_computed) for one in active]
        has_drafts = any(chosen)
        return StepPlan(
            step_id=len(self.plans) + 1,
            new_rows=new_rows,
            deltas=deltas,
            rows=np.array([one.row for one in active], np.int32),
            num_computed=np.array([one.num_computed for one in active], np.int32),
            num_scheduled=np.array([count + len(draft) for count, draft in zip(known, chosen)], np.int32),
            sample=np.array([one.num_computed + count == len(one.known) for one, count in zip(active, known)]),
            num_drafts=np.array([len(draft) for draft in chosen] if has_drafts else [], np.int32),
            draft_token_ids=np.array([token for draft in chosen for token in draft], np.int32),
            num_proposals=self._num_proposals,
        )

    def _execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        result = self._worker.execute(plan_from_bytes(pack(plan)))  # as it arrives over the wire
        assert result is not None
        return result_from_bytes(pack(result))

    def _commit(self, active: list[Generated], chosen: list[list[int]], plan: StepPlan) -> None:
        result = self._execute(plan)
        counts = result.num_tokens.tolist() or [1] * int(plan.sample.sum())
        assert len(result.token_ids) == sum(counts)
        tokens, sampled = result.token_ids.tolist(), 0
        by_row = {one.row: one for one in active}
        for one, draft, samples, scheduled in zip(active, chosen, plan.sample, plan.num_scheduled.tolist()):
            one.num_computed += scheduled - len(draft)
            if not samples:
                continue
            count = counts[sampled]
            one.known += tokens[:count]
            one.num_computed = len(one.known) - 1
            one.steps.append(count)
            one.proposals.append([token for token in result.proposals[sampled].tolist() if token >= 0])
            tokens, sampled = tokens[count:], sampled + 1
        for entry in result.logprobs:
            one = by_row[entry.row]
            one.logprobs += entry.entries
            one.logprob_positions += range(entry.first_position, entry.first_position + len(entry.entries))


NO_CHANGES = StepPlan(step_id=0).deltas


def _new_row(one: Generated) -> NewRow:
    return NewRow(
        row=one.row,
        token_ids=np.array(one.known, np.int32),
        num_prompt_tokens=one.num_prompt_tokens,
        sampling=one.sampling,
    )
