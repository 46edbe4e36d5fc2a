"""The longest prefix hit the obvious way: try every length from the largest down, and ask what it needs.

Knows nothing of blocks, hashes or how the ledger searches: a cached thing is a (group, token prefix) pair. What a hit
of a length needs is written from the rules of each cache type, one function per type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from blockferry.engine.kv.groups import hit_alignment, one_layer
from blockferry.engine.kv.reach import ChunkReach, FullReach, RetainedPromptReach, WindowReach
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup, MambaSpec

Prefix = tuple[object, ...]
Cached = set[tuple[int, Prefix]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One block of a hit: it must be cached under a prefix of one of these lengths."""

    column: int
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OracleHit:
    """The longest hit, and what it is made of per group."""

    num_tokens: int
    needs: tuple[tuple[Need, ...], ...]


class HitOracle:
    """Answers lookups from a set of cached prefixes."""

    def __init__(self, config: KVCacheConfig, *, num_hash_lookahead_tokens: int = 0) -> None:
        self.groups = config.groups
        self.hash_block = config.hash_block_size
        self.alignment = hit_alignment(config.groups, config.hash_block_size)
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens

    def prefix(self, salt: str, tokens: list[int], length: int) -> Prefix:
        """What a block that ends at `length` is cached under."""
        return (salt, *tokens[: length + self.num_hash_lookahead_tokens])

    def longest(self, salt: str, tokens: list[int], cached: Cached) -> OracleHit:
        """The longest hit that every group agrees to."""
        hashed = (len(tokens) - self.num_hash_lookahead_tokens) // self.hash_block * self.hash_block
        limit = min(len(tokens) - 1, hashed)
        nothing = OracleHit(num_tokens=0, needs=((),) * len(self.groups))
        if not any(self.is_ever_needed(group) for group in self.groups):
            return nothing  # a hit without a single block behind it is none
        for length in range(limit // self.alignment * self.alignment, 0, -self.alignment):
            if all(
                self.is_held(number, need, salt, tokens, hashed, cached)
                for number, group in enumerate(self.groups)
                for need in self.proof(group, length, limit)
            ):
                return OracleHit(
                    num_tokens=length, needs=tuple(tuple(self.needs(group, length, limit)) for group in self.groups)
                )
        return nothing

    def is_held(self, number: int, need: Need, salt: str, tokens: list[int], hashed: int, cached: Cached) -> bool:
        return any(
            length <= hashed and (number, self.prefix(salt, tokens, length)) in cached for length in need.lengths
        )

    def is_ever_needed(self, group: KVCacheGroup) -> bool:
        spec = one_layer(group.spec)
        is_bare = isinstance(spec, AttentionSpec) and isinstance(spec.reach, WindowReach) and spec.reach.window == 1
        return spec.prefix_cacheable and (group.is_draft or not is_bare)

    def proof(self, group: KVCacheGroup, length: int, limit: int) -> Iterator[Need]:
        """The blocks that must be cached for a hit of `length`: those it brings, and a draft's next one."""
        yield from self.needs(group, length, limit)
        if group.is_draft:
            unit = min(self.alignment, group.spec.tokens_per_block)
            end = length + unit
            column = (end - 1) // group.spec.tokens_per_block
            whole = (column + 1) * group.spec.tokens_per_block
            yield Need(column=column, lengths=tuple(range(end, min(whole, limit + unit) + 1, self.hash_block)))

    def needs(self, group: KVCacheGroup, length: int, limit: int) -> Iterator[Need]:
        """The blocks that a hit of `length` brings."""
        spec = one_layer(group.spec)
        if not spec.prefix_cacheable:
            return
        block = spec.tokens_per_block
        if isinstance(spec, MambaSpec):
            yield Need(column=-(-length // block) - 1, lengths=(length,))
            return
        assert isinstance(spec, AttentionSpec), spec
        first_token = self.first_token_read(spec, length)
        for column in range(first_token // block, length // block):
            yield Need(column=column, lengths=((column + 1) * block,))
        if length % block:
            unit = min(self.alignment, block) if group.is_draft else 0
            whole = (length // block + 1) * block
            lengths = range(length, min(whole, limit + unit) + 1, self.hash_block)
            yield Need(column=length // block, lengths=tuple(lengths))

    def first_token_read(self, spec: AttentionSpec, position: int) -> int:
        """First token that the token at `position` reads; `position` itself when it reads no other."""
        match spec.reach:
            case FullReach() | RetainedPromptReach():
                return 0
            case WindowReach(window=window):
                return max(0, position - (window - 1))
            case ChunkReach(chunk=chunk):
                return position - position % chunk
        raise AssertionError(spec)
