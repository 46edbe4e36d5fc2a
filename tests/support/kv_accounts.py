"""Which columns of a row must hold a block, and how many blocks a call takes: one group at a time, in plain lists.

Written from the rules of each type; knows no block ids, no sharing and no hashes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from blockferry.engine.kv.groups import one_layer
from blockferry.engine.kv.reach import (
    ChunkReach,
    EncoderReach,
    FullReach,
    RetainedPromptReach,
    SequenceLimits,
    WindowReach,
)
from blockferry.engine.kv.spec import AttentionSpec, KVCacheSpec, MambaMode, MambaSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One allocation in tokens: those of the hit, up to the last external one, the last new one, the last slot."""

    num_hit: int = 0
    num_total: int = 0
    num_main: int = 0
    num_slots: int = 0
    num_encoder: int = 0


def up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


class Account:
    """One row in one group: held[c] says whether column c holds a block."""

    def __init__(
        self, spec: KVCacheSpec, *, num_prompt_tokens: int, limits: SequenceLimits, export_length: int = 0
    ) -> None:
        """export_length: of the state that a prefill chunk that passes it leaves in a block of its own."""
        self.export_length = export_length
        self.spec = one_layer(spec)
        self.block = spec.tokens_per_block
        self.num_prompt_tokens = num_prompt_tokens
        self.cap = spec.max_admission_blocks_per_request(limits)
        self.held: list[bool] = []
        self.has_run = False

    @property
    def num_speculative(self) -> int:
        return self.spec.num_speculative_blocks if isinstance(self.spec, MambaSpec) else 0

    @property
    def moves_states(self) -> bool:
        return isinstance(self.spec, MambaSpec) and self.spec.mode is MambaMode.ALIGN

    def copy(self) -> Account:
        twin = object.__new__(Account)
        twin.__dict__.update(self.__dict__)
        twin.held = list(self.held)
        return twin

    # what a type does not read any more

    def num_unread(self, num_computed: int) -> int:
        """Leading columns that no token from num_computed on reads."""
        match self.spec:
            case MambaSpec():
                tokens = num_computed - 1
            case AttentionSpec(reach=WindowReach(window=window)):
                tokens = num_computed - window + 1
            case AttentionSpec(reach=ChunkReach(chunk=chunk)):
                tokens = num_computed - num_computed % chunk
            case AttentionSpec(reach=RetainedPromptReach(window=window)):
                tokens = num_computed - window
            case _:
                tokens = 0
        return max(0, tokens) // self.block

    def first_that_may_go(self) -> int:
        if isinstance(self.spec, AttentionSpec) and isinstance(self.spec.reach, RetainedPromptReach):
            return up(self.num_prompt_tokens, self.block)
        return 0

    def skip(self, num_computed: int) -> None:
        num_kept = len(self.held) - (self.num_speculative if self.moves_states else 0)
        for column in range(self.first_that_may_go(), min(self.num_unread(num_computed), num_kept)):
            self.held[column] = False

    # growing

    def num_columns(self, ask: Ask) -> int:
        """Columns that the row has after the call, if it had none."""
        match self.spec:
            case MambaSpec(mode=MambaMode.ALIGN):
                return up(ask.num_main, self.block) + self.num_speculative
            case MambaSpec():
                return up(ask.num_slots, self.block) + self.num_speculative
            case AttentionSpec(reach=EncoderReach()):
                return up(ask.num_encoder, self.block)
            case AttentionSpec():
                return up(ask.num_slots, self.block)
        return 1  # a scratch ring

    def adopt(self, held: Iterable[bool], ask: Ask) -> None:
        """Start with a hit; what is out of reach after the external tokens is not even touched."""
        self.held = list(held)
        gone = 0 if self.first_that_may_go() else self.num_unread(ask.num_total)
        self.held += [False] * (gone - len(self.held))
        self.held[:gone] = [False] * gone
        if ask.num_total > ask.num_hit and self.spec.prefix_cacheable:
            self.held += [True] * (up(ask.num_total, self.block) - len(self.held))

    def grow(self, ask: Ask) -> None:
        wanted, exported = self.num_columns(ask), self.exported_column(ask)
        if self.moves_states and wanted > len(self.held):
            self.move_state(wanted)
        self.held += [True] * (wanted - len(self.held))
        if exported is not None:
            self.held[exported] = True
        self.has_run = True

    def exported_column(self, ask: Ask) -> int | None:
        """A new column, before the running state's."""
        if not ask.num_total < self.export_length < ask.num_main:
            return None
        column = min(up(self.export_length, self.block), up(ask.num_main, self.block) - 1) - 1
        return column if column >= len(self.held) else None

    def move_state(self, wanted: int) -> None:
        """The running state and its speculative ones are the last columns; speculative blocks move along."""
        running = wanted - self.num_speculative - 1
        num_moved = 0
        if self.has_run:
            for column in range(len(self.held) - self.num_speculative, min(len(self.held), running)):
                self.held[column] = False
                num_moved += 1
        self.held += [False] * (running - len(self.held))
        self.held += [True] * num_moved

    @property
    def num_held(self) -> int:
        return sum(self.held)

    # the gate for whole sequences

    def num_for_whole(self, num_tokens: int, ask: Ask, hit: list[bool]) -> int:
        """New blocks that the whole sequence would take at first, under the most that the type ever holds."""
        whole = dataclasses.replace(ask, num_main=num_tokens, num_slots=num_tokens)
        gone = 0 if self.first_that_may_go() else self.num_unread(ask.num_total)
        if self.moves_states:
            twin = self.copy()
            twin.export_length = 0
            twin.adopt(hit, whole)
            twin.grow(whole)
            return twin.num_held - sum(hit[gone:])
        required = self.num_columns(whole)
        if not isinstance(self.spec, AttentionSpec) or not isinstance(self.spec.reach, EncoderReach):
            required = min(required, self.cap)
        return max(0, required - max(gone, len(hit)))


def is_dense(spec: KVCacheSpec) -> bool:
    """Whether a row that lost later tokens can go on from earlier ones."""
    spec = one_layer(spec)
    return isinstance(spec, AttentionSpec) and isinstance(spec.reach, FullReach)


def export_length(spec: KVCacheSpec, num_prompt_tokens: int, hash_block_size: int) -> int:
    """Where a hit on a whole prompt resumes, if layers can export the state of that length from a longer chunk."""
    spec = one_layer(spec)
    if not isinstance(spec, MambaSpec) or not spec.num_prefill_checkpoint_blocks:
        return 0
    return (num_prompt_tokens - 1) // hash_block_size * hash_block_size
