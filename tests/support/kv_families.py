"""Ledgers of every cache family, small, for tests that play requests on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from support.kv_configs import attention, states
from support.slab_serving import geometry

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.reach import ChunkReach, EncoderReach, FullReach, RetainedPromptReach, WindowReach
from blockferry.engine.kv.spec import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaMode,
    MambaSpec,
    ScratchRingSpec,
    SlabGeometry,
)

MAX_MODEL_LEN = 60
MAX_ENCODER_TOKENS = 12

FULL, FULL_8 = attention(4, FullReach()), attention(8, FullReach())
WINDOW = attention(4, WindowReach(window=9))
STATES, STATES_8 = states(4), states(8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A ledger to test; every field but the groups has a usual value."""

    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int = 4
    num_blocks: int = 40
    options: LedgerOptions = dataclasses.field(default_factory=LedgerOptions)
    has_events: bool = False
    slab: SlabGeometry | None = None

    @property
    def config(self) -> KVCacheConfig:
        """The ledger's."""
        num_blocks = self.num_blocks
        if self.slab is not None:
            num_blocks = 1 + max(self.slab.num_pages(group) for group in range(len(self.groups)))
        return KVCacheConfig(
            num_blocks=num_blocks, groups=self.groups, hash_block_size=self.hash_block_size, slab=self.slab
        )


def groups(*specs: KVCacheSpec, drafts: Sequence[int] = ()) -> tuple[KVCacheGroup, ...]:
    """One group per spec; drafts are the numbers of those that draft."""
    return tuple(
        KVCacheGroup(layer_ids=(number,), spec=spec, is_draft=number in drafts) for number, spec in enumerate(specs)
    )


def window(size: int, block_size: int = 4) -> KVCacheSpec:
    """A sliding window."""
    return attention(block_size, WindowReach(window=size))


def chunks(size: int, block_size: int = 4) -> KVCacheSpec:
    """Chunked local attention."""
    return attention(block_size, ChunkReach(chunk=size))


def retained(size: int, block_size: int = 4) -> KVCacheSpec:
    """A window behind a prompt that is kept."""
    return attention(block_size, RetainedPromptReach(window=size))


def running_state(*, num_speculative: int) -> MambaSpec:
    """One state per sequence, never shared."""
    return MambaSpec(
        block_size=64,
        shapes=((8,),),
        dtype_bytes=(4,),
        mode=MambaMode.NONE,
        num_speculative_blocks=num_speculative,
    )


UNCACHED = LedgerOptions(enable_caching=False)
DRAFTING = LedgerOptions(num_lookahead_tokens=2)
IN_FLIGHT = LedgerOptions(num_lookahead_tokens=2, max_in_flight_tokens=16)

FAMILIES: dict[str, Family] = {
    "full": Family(groups=groups(FULL)),
    "full-tiny": Family(groups=groups(FULL), num_blocks=9),
    "full-lookahead": Family(groups=groups(FULL), options=DRAFTING),
    "full-events": Family(groups=groups(FULL), has_events=True, num_blocks=20),
    "full-uncached": Family(groups=groups(FULL), options=UNCACHED, num_blocks=20),
    "full-hash-finer": Family(groups=groups(FULL_8)),
    "two-fulls": Family(groups=groups(FULL, FULL_8)),
    "window": Family(groups=groups(WINDOW), num_blocks=24),
    "window-of-one": Family(groups=groups(window(1), FULL)),
    "window-in-flight": Family(groups=groups(WINDOW, FULL), options=IN_FLIGHT),
    "full-window": Family(groups=groups(FULL, WINDOW)),
    "full-window-tiny": Family(groups=groups(FULL, WINDOW), num_blocks=18),
    "full-window-events": Family(groups=groups(FULL, WINDOW), has_events=True, num_blocks=30),
    "full-windows": Family(groups=groups(FULL, window(5), window(17), window(12, 8))),
    "two-windows": Family(groups=groups(window(6), window(17, 8))),
    "chunks": Family(groups=groups(chunks(8)), num_blocks=24),
    "chunks-odd": Family(groups=groups(chunks(10), FULL)),
    "full-chunks": Family(groups=groups(FULL, chunks(16), WINDOW)),
    "retained": Family(groups=groups(retained(6)), num_blocks=30),
    "retained-window": Family(groups=groups(retained(6), WINDOW)),
    "states": Family(groups=groups(STATES), num_blocks=24),
    "full-states": Family(groups=groups(FULL, STATES)),
    "full-states-tiny": Family(groups=groups(FULL, STATES), num_blocks=18),
    "full-states-inside": Family(groups=groups(FULL, STATES_8), has_events=True),
    "full-states-inside-both": Family(groups=groups(FULL_8, states(16)), num_blocks=30),
    "full-inside": Family(groups=groups(FULL_8, STATES_8), hash_block_size=2),
    "states-of-two-sizes": Family(groups=groups(FULL, STATES, STATES_8)),
    "full-window-states-inside": Family(groups=groups(FULL, WINDOW, STATES_8), num_blocks=60),
    "full-states-drafting": Family(groups=groups(FULL, states(8, num_speculative=2)), options=DRAFTING),
    "states-shorter-than-drafts": Family(
        groups=groups(attention(2, FullReach()), states(2, num_speculative=3)),
        options=LedgerOptions(num_lookahead_tokens=3),
        hash_block_size=2,
        num_blocks=80,
    ),
    "slabs-states-drafting": Family(
        groups=groups(FULL, states(4, num_speculative=2)), options=DRAFTING, slab=geometry((4, 1), 24)
    ),
    "states-exported": Family(groups=groups(FULL, states(4, num_exported=1)), num_blocks=30),
    "states-exported-inside": Family(
        groups=groups(FULL, states(8, num_speculative=2, num_exported=1)), options=DRAFTING, num_blocks=50
    ),
    "state-uncached": Family(
        groups=groups(FULL, running_state(num_speculative=2)),
        options=LedgerOptions(enable_caching=False, num_lookahead_tokens=2),
    ),
    "encoder": Family(
        groups=groups(FULL, attention(4, EncoderReach())),
        options=LedgerOptions(enable_caching=False, max_num_encoder_tokens=MAX_ENCODER_TOKENS),
    ),
    "ring": Family(groups=groups(FULL, ScratchRingSpec(block_size=4, page_bytes=64), WINDOW)),
    "draft-full": Family(groups=groups(FULL, drafts=(0,)), options=DRAFTING),
    "draft-group": Family(groups=groups(FULL, FULL, drafts=(1,)), options=DRAFTING),
    "draft-window": Family(groups=groups(FULL, WINDOW, drafts=(1,)), options=DRAFTING),
    "draft-all": Family(groups=groups(FULL, WINDOW, window(12, 8), drafts=(0, 1, 2)), num_blocks=60),
    "draft-chunks-states": Family(
        groups=groups(FULL, chunks(8), states(4, num_speculative=2), drafts=(0, 1)), options=DRAFTING, num_blocks=60
    ),
    "retain-boundary": Family(groups=groups(FULL, WINDOW), options=LedgerOptions(retention_interval=0)),
    "retain-some": Family(
        groups=groups(FULL, WINDOW, STATES), options=LedgerOptions(retention_interval=16), num_blocks=60
    ),
    "retain-inside": Family(groups=groups(FULL, STATES_8), options=LedgerOptions(retention_interval=0), num_blocks=60),
    "hash-lookahead": Family(groups=groups(FULL, WINDOW), options=LedgerOptions(num_hash_lookahead_tokens=1)),
    "hash-lookahead-inside": Family(
        groups=groups(FULL, STATES_8), options=LedgerOptions(num_hash_lookahead_tokens=1), hash_block_size=2
    ),
    "context-parallel": Family(
        groups=groups(attention(4, FullReach(), context_parallel=2), states(16)), hash_block_size=8
    ),
    "two-states-inside": Family(groups=groups(FULL, STATES_8, STATES_8), num_blocks=50),
    "slabs-full-window": Family(groups=groups(FULL, WINDOW), slab=geometry((2, 3), 12), has_events=True),
    "slabs-full-states": Family(groups=groups(FULL, STATES), slab=geometry((4, 1), 10, tail_group=0, tail_pages=2)),
    "slabs-full-states-inside": Family(groups=groups(FULL, STATES_8), slab=geometry((4, 1), 14)),
    "slabs-many": Family(
        groups=groups(FULL, window(5), window(17, 8), chunks(8), STATES), slab=geometry((3, 3, 2, 4, 1), 40)
    ),
    "many": Family(
        groups=groups(FULL, window(5), window(17, 8), chunks(8), retained(6), STATES),
        options=LedgerOptions(watermark=0.05),
        num_blocks=90,
        has_events=True,
    ),
}
