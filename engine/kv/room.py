"""What sequences will need of a ledger's blocks: answers for whoever admits them. Takes and changes nothing."""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.coordinator import Coordinator
from blockferry.engine.kv.groups import hit_alignment
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.rows import RowTable


class Room:
    """The future needs of sequences of one ledger, over all groups. Units are those of Pools."""

    def __init__(self, config: KVCacheConfig, coordinator: Coordinator, rows: RowTable) -> None:
        self._coordinator = coordinator
        self._pools = coordinator.pools
        self._rows = rows
        self._num_groups = len(config.groups)
        self._num_copies = _num_copies(config, coordinator)

    @property
    def max_tokens_that_fit(self) -> int:
        """Longest sequence that an otherwise empty pool and max_model_len allow, without an encoder's input."""
        low, high = 0, self._rows.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.can_ever_fit(middle) else (low, middle - 1)
        return low

    def can_ever_fit(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Whether a sequence of num_tokens fits the pool, at every moment of its life, when nothing else is in it."""
        return self._pools.can_hold(self._most_blocks(num_tokens, num_encoder_tokens))

    def to_hold(self, num_tokens: int, hit: PrefixHit | None, num_encoder_tokens: int = 0) -> int:
        """Most units that a sequence of num_tokens will take beside the blocks of a hit. Cost: O(groups), no search."""
        needs = self._most_blocks(num_tokens, num_encoder_tokens)
        if hit is not None:
            for group, block_ids in enumerate(hit.block_ids):
                needs[self._pools.pool_of(group)] -= int(np.count_nonzero(block_ids))
        return self._pools.count_units([max(0, need) for need in needs])

    def to_finish(self, row: int) -> int:
        """Most units that a row will take, beside the blocks it holds, until all its known tokens are computed."""
        needs = self._most_blocks(int(self._rows.num_tokens[row]), int(self._rows.num_encoder_tokens[row]))
        for group in range(self._num_groups):
            needs[self._pools.pool_of(group)] -= int(np.count_nonzero(self._coordinator.block_ids(row, group)))
        return self._pools.count_units([max(0, need) for need in needs])

    def _most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> list[int]:
        """Most blocks, per pool, that a sequence ever holds at once, those that it copies from included."""
        most = self._coordinator.most_blocks(num_tokens, num_encoder_tokens)
        return [num_blocks + num_copies for num_blocks, num_copies in zip(most, self._num_copies, strict=True)]


def _num_copies(config: KVCacheConfig, coordinator: Coordinator) -> list[int]:
    """Blocks, per pool, that a row may hold twice in one step: those that a hit ends inside of."""
    counts = [0] * len(coordinator.pools.pools)
    alignment = hit_alignment(config.groups, config.hash_block_size)
    for number, group in enumerate(config.groups):
        if group.spec.prefix_cacheable and alignment < group.spec.tokens_per_block:
            counts[coordinator.pools.pool_of(number)] += 1
    return counts
