"""The longest hit that all cache groups have in common, for any number of groups of any types.

Every group says of every possible length whether it could resume there; the longest one that all agree on is the hit.
So there is no order of groups, no iteration, and nothing to converge: the answer is the maximum by construction.
Owns nothing but the groups; never changes the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.full_attention import FullRule
from blockferry.engine.kv.hit_rules import HitRule, Presence
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.kv.spec import KVCacheGroup, KVCacheSpec
from blockferry.engine.kv.type_manager import NO_BLOCKS, TypeManager
from blockferry.engine.request import BoolArray, Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What the prefix cache holds of a sequence. Valid until the ledger next drops a hash."""

    num_tokens: int
    block_ids: tuple[Int32Array, ...]  # per group, one entry per block, null where none is needed
    junction: int = 0  # tokens: a longer prefix that groups like the first hold and another has not kept; 0: none
    num_drops: int = 0  # of the index, when it was found


class SearchIndex(Protocol):
    """What a search asks: PrefixIndex, or an index that joins it with others."""

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Blocks per entry and group, [entries, groups]; 0 for none."""

    @property
    def num_drops(self) -> int:
        """Unchanged while all that was found is still there."""

    def find(self, digests: Iterable[bytes]) -> Int32Array:
        """The entry of each digest; that of none has no blocks."""

    def find_run(self, digests: Iterable[bytes]) -> Int32Array:
        """The entries of the leading digests that have one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Granularity of a ledger's prefix cache, in tokens."""

    hash_block_size: int
    alignment: int  # hits have multiples of it; hash_block_size where they may end inside blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchGroup:
    """Cache groups that need the same of a hit, always asked together."""

    groups: tuple[int, ...]
    spec: KVCacheSpec
    rule: HitRule
    is_draft: bool

    @property
    def tokens_per_block(self) -> int:
        """Tokens that one block of each group stands for."""
        return self.spec.tokens_per_block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    group: SearchGroup
    presence: Presence


def search_groups(groups: Sequence[KVCacheGroup], managers: Sequence[TypeManager]) -> list[SearchGroup]:
    """Groups that can be asked, those that need the same as one; full attention first, as it bounds all others."""
    rules = {
        group: rule for manager in managers for group, rule in zip(manager.groups, manager.rules, strict=True) if rule
    }
    together: dict[tuple[KVCacheSpec, bool], list[int]] = {}
    for number, group in enumerate(groups):
        if number in rules and group.spec.prefix_cacheable:
            together.setdefault((group.spec, group.is_draft), []).append(number)
    found = [
        SearchGroup(groups=tuple(numbers), spec=spec, rule=rules[numbers[0]], is_draft=is_draft)
        for (spec, is_draft), numbers in together.items()
    ]
    return sorted(found, key=lambda group: not isinstance(group.rule, FullRule))


class HitSearch:
    """Looks sequences up. A chain is the digests of a sequence's hash blocks."""

    def __init__(
        self, groups: Sequence[SearchGroup], index: SearchIndex, *, num_groups: int, sizes: CacheSizes
    ) -> None:
        self._index = index
        self._num_groups = num_groups
        self._hash_block_size = sizes.hash_block_size
        self._alignment = sizes.alignment
        self._groups = list(groups)
        self._asked = [group for group in groups if group.is_draft or group.rule.needs_blocks(group.tokens_per_block)]
        # how far after the end of a hit the block may end that must be there, or may serve it
        self._num_tokens_beyond = max(
            [
                group.tokens_per_block
                for group in self._asked
                if group.is_draft or group.tokens_per_block > self._alignment
            ],
            default=0,
        )

    @property
    def no_hit(self) -> PrefixHit:
        """The hit of a sequence nothing of which is cached."""
        return PrefixHit(num_tokens=0, block_ids=(NO_BLOCKS,) * self._num_groups)

    def find(self, chain: Sequence[bytes], max_tokens: int) -> PrefixHit:
        """The longest common hit of at most max_tokens."""
        max_tokens = min(max_tokens, len(chain) * self._hash_block_size)
        if not self._asked or max_tokens < self._alignment:
            return self.no_hit
        entries = self._find_entries(chain, max_tokens)
        lengths = np.arange(0, max_tokens + 1, self._alignment, dtype=np.int32)
        found = [_Found(group=group, presence=self._presence(group, entries, max_tokens)) for group in self._groups]
        asked = [one for one in found if one.group in self._asked]
        spec = asked[0].group.spec
        can_end = _can_all_end([one for one in asked if one.group.spec == spec], lengths)
        longest_first = int(lengths[can_end.nonzero()[0][-1]])
        can_end &= _can_all_end([one for one in asked if one.group.spec != spec], lengths)
        num_tokens = int(lengths[can_end.nonzero()[0][-1]])
        block_ids = [NO_BLOCKS] * self._num_groups
        if num_tokens:
            for one in found:
                for member in one.group.groups:
                    block_ids[member] = self._blocks_of(one, member, entries, num_tokens)
        return PrefixHit(
            num_tokens=num_tokens,
            block_ids=tuple(block_ids),
            junction=longest_first if longest_first > num_tokens else 0,
            num_drops=self._index.num_drops,
        )

    def _find_entries(self, chain: Sequence[bytes], max_tokens: int) -> Int32Array:
        """Entries of the hash blocks that can matter: up to the first block that full attention lacks.

        And what lies beyond the end of a hit, which full attention need not hold.
        """
        first = self._asked[0]
        max_tokens += max(self._num_draft_tokens(group) for group in self._asked)
        stop = max_tokens // self._hash_block_size
        if isinstance(first.rule, FullRule):
            step = first.tokens_per_block // self._hash_block_size
            run = self._index.find_run(chain[step - 1 : stop : step])
            if step == 1 and self._num_tokens_beyond <= self._hash_block_size:
                return run
            stop = min(stop, (len(run) + 1) * step + self._num_tokens_beyond // self._hash_block_size)
        return self._index.find(chain[:stop])

    def _num_draft_tokens(self, group: SearchGroup) -> int:
        """Tokens past the end of a hit that a draft group must hold too, as they are computed again."""
        if not group.is_draft:
            return 0
        return min(self._alignment, group.tokens_per_block)

    def _presence(self, group: SearchGroup, entries: Int32Array, max_tokens: int) -> Presence:
        step = group.tokens_per_block // self._hash_block_size
        num_draft_tokens = self._num_draft_tokens(group)
        entries = entries[: (max_tokens + num_draft_tokens) // self._hash_block_size]
        at_ends = self._is_present(group, entries[step - 1 :: step])
        tails = NO_BLOCKS
        if self._alignment < group.tokens_per_block:
            lengths = np.arange(1, len(entries) + 1, dtype=np.int32) * self._hash_block_size
            tails = lengths[self._is_present(group, entries) & (lengths % group.tokens_per_block != 0)]
        return Presence(
            blocks=at_ends,
            tails=tails,
            tokens_per_block=group.tokens_per_block,
            num_draft_tokens=num_draft_tokens,
        )

    def _is_present(self, group: SearchGroup, entries: Int32Array) -> BoolArray:
        columns = [self._index.blocks[entries, member] != 0 for member in group.groups]
        is_present: BoolArray = columns[0] if len(columns) == 1 else np.logical_and.reduce(columns)
        return is_present

    def _blocks_of(self, found: _Found, member: int, entries: Int32Array, num_tokens: int) -> Int32Array:
        group = found.group
        step = group.tokens_per_block // self._hash_block_size
        num_whole = num_tokens // group.tokens_per_block
        block_ids: Int32Array = np.zeros(cdiv(num_tokens, group.tokens_per_block), np.int32)
        first = group.rule.first_column(num_tokens, group.tokens_per_block)
        ends = entries[(first + 1) * step - 1 : num_whole * step : step]
        block_ids[first:num_whole] = self._index.blocks[ends, member]
        if num_whole < len(block_ids):
            length = group.rule.tail_length(found.presence, num_tokens)
            block_ids[-1] = self._index.blocks[entries[length // self._hash_block_size - 1], member]
        return block_ids


def _can_all_end(found: Sequence[_Found], lengths: Int32Array) -> BoolArray:
    can_end: BoolArray = np.ones(len(lengths), np.bool_)
    for one in found:
        can_end &= one.group.rule.can_end(one.presence, lengths)
    return can_end
