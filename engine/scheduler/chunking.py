"""Where a prefill chunk must end, so that recurrent layers leave states behind that other sequences can start from.

Pure functions over token counts; knows no rows and no blocks. Ledgers without such layers never ask.

    hit            kept lengths        last aligned length     target
     | chunk | chunk |       chunk        |    last chunk        |
     s       ^ a multiple of the state block, where the budget reaches one
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from blockferry.engine.kv.groups import hit_alignment, scheduler_block_size
from blockferry.engine.kv.spec import KVCacheConfig, MambaSpec, one_layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateGrid:
    """At which lengths the states of a model are worth keeping. All in tokens.

    A layer writes one state per chunk, the one at the chunk's end, into the block that the end is in. So a chunk that
    starts inside a block may fill that block but not leave it: the block would keep a state of another length than
    its own, under which it is found later.
    """

    block_sizes: tuple[int, ...]  # of the groups that keep states
    hit_alignment: int  # every hit is a multiple of it
    replay_shift: int  # tokens before a prompt's end where a hit on all of it can resume at the latest
    exports_states: bool = False  # layers keep the state of the prompt's last kept length from within a chunk

    @classmethod
    def of(cls, config: KVCacheConfig) -> StateGrid | None:
        """The grid of a ledger; None where no group keeps states."""
        specs = [group.spec for group in config.groups]
        keeping = [spec for spec in map(one_layer, specs) if isinstance(spec, MambaSpec) and spec.prefix_cacheable]
        if not keeping:
            return None
        has_draft = any(group.is_draft for group in config.groups)
        return cls(
            block_sizes=tuple(sorted({spec.block_size for spec in keeping})),
            hit_alignment=hit_alignment(config.groups, config.hash_block_size),
            replay_shift=scheduler_block_size(config.groups) if has_draft else 1,
            exports_states=all(spec.num_prefill_checkpoint_blocks for spec in keeping),
        )

    @property
    def spacing(self) -> int:
        """Tokens between lengths at which every group keeps a state that a hit can end at."""
        return math.lcm(self.hit_alignment, *self.block_sizes)

    def kept_lengths(self, *, num_prompt_tokens: int, num_tokens: int, junction: int) -> tuple[int, ...]:
        """Lengths of a sequence at which a chunk must end, if it comes by.

        They are: where a hit on the whole prompt resumes, where one on all of num_tokens does, and the junction, where
        the sequence leaves a prefix that others share (0: none). Of a prompt whose last kept state is exported, its
        end in place of the first two.
        """
        if self.exports_states and num_tokens <= num_prompt_tokens:
            return num_tokens, junction // self.spacing * self.spacing
        prompt = max(0, num_prompt_tokens - self.replay_shift) // self.hit_alignment * self.hit_alignment
        last = (num_tokens - 1) // self.spacing * self.spacing
        return prompt, last, junction // self.spacing * self.spacing

    def end_chunk(self, start: int, limit: int, *, kept_lengths: Iterable[int]) -> int:
        """Where a chunk from start ends that may reach limit; always beyond start.

        It goes as far as the budget lets it, and waits for nothing: a chunk too short for the next multiple ends inside
        the block, and the next one fills it. (vLLM's aligned split lets such a sequence wait for a budget of a whole
        block, vllm/v1/core/sched/scheduler.py, which decode rows can keep from it for as long as they run.)
        """
        for size in self.block_sizes:
            if start % size:
                limit = min(limit, (start // size + 1) * size)
        must_end = min((length for length in kept_lengths if start < length <= limit), default=None)
        if must_end is not None:
            return must_end
        aligned = limit // self.spacing * self.spacing
        return aligned if aligned > start else limit
