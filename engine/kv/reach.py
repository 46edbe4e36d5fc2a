"""What one attention layer stores of a token, and which tokens stay in reach of the next one.

Values that an AttentionSpec (spec.py) is put together from. Sizes are bytes of one rank. Owns no state.
"""

from __future__ import annotations

import dataclasses
import enum


class SpecKind(enum.StrEnum):
    """Cache type of a spec, as events and plans name it."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local_attention"
    RETAINED_PROMPT = "retained_prompt_window"
    MLA = "mla_attention"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CROSS_ATTENTION = "cross_attention"
    ENCODER_ONLY = "encoder_only_attention"
    SCRATCH_RING = "scratch_ring"
    UNIFORM_TYPE = "uniform_type"


NEVER_DROPPING = frozenset(
    {
        SpecKind.FULL_ATTENTION,
        SpecKind.MLA,
        SpecKind.CROSS_ATTENTION,
        SpecKind.ENCODER_ONLY,
        SpecKind.SCRATCH_RING,
    }
)
"""Types of which a sequence keeps every block to its end, so that alone it fills one slab after the other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """What bounds one sequence's need of blocks. All in tokens."""

    max_model_len: int
    max_in_flight_tokens: int  # scheduled and not yet settled, at most
    max_num_encoder_tokens: int = 0


def cdiv(numerator: int, denominator: int) -> int:
    """Quotient, rounded up."""
    return -(-numerator // denominator)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVContent:
    """Keys and values of one token: one of each per KV head."""

    num_kv_heads: int  # on this rank
    head_dim: int
    dtype_bytes: int
    head_dim_v: int | None = None  # where values are of another width than keys

    @property
    def head_bytes(self) -> int:
        """Bytes of one head: K then V."""
        return (self.head_dim + (self.head_dim if self.head_dim_v is None else self.head_dim_v)) * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of all heads of this rank."""
        return self.num_kv_heads * self.head_bytes

    @property
    def is_latent(self) -> bool:
        """Whether all heads share one vector."""
        return False


FP8_DS_MLA_TOKEN_BYTES = 656
"""One token of DeepSeek's sparse MLA in fp8: 512 latents of 1 byte, 4 float32 scales, 64 bfloat16 rotary values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentContent:
    """One vector per token for all heads, on every rank: multi-head latent attention (MLA)."""

    latent_dim: int  # compressed KV and the rotary key
    dtype_bytes: int
    is_fp8_ds_mla: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of the vector."""
        return FP8_DS_MLA_TOKEN_BYTES if self.is_fp8_ds_mla else self.latent_dim * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the vector: it stands for one head."""
        return self.token_bytes

    @property
    def is_latent(self) -> bool:
        """Whether all heads share one vector."""
        return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullReach:
    """Every token sees all tokens before it.

    computes_window and computes_chunk: the layer is a local one, kept whole by a plan without hybrid groups.
    """

    computes_window: int | None = None
    computes_chunk: int | None = None

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type."""
        return SpecKind.MLA if is_latent else SpecKind.FULL_ATTENTION

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return FullReach()

    @property
    def kept_whole(self) -> Reach:
        """It is."""
        return self

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        return cdiv(limits.max_model_len, tokens_per_block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowReach:
    """Every token sees the last `window` tokens, itself included."""

    window: int
    extra_retained_tokens: int = 0  # below the window, for the replay of multi-module drafts

    @property
    def num_retained_tokens(self) -> int:
        """Computed tokens that the next one still sees, or that a replay still needs."""
        return self.window - 1 + self.extra_retained_tokens

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type."""
        return SpecKind.SLIDING_WINDOW_MLA if is_latent else SpecKind.SLIDING_WINDOW

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return self

    @property
    def kept_whole(self) -> Reach:
        """Full reach, for a plan that stores every token of a local layer."""
        return FullReach(computes_window=self.window)

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """As of FullReach; one more than the tokens fill, as a window need not start at a block's edge."""
        num_tokens = min(self.num_retained_tokens + limits.max_in_flight_tokens, limits.max_model_len)
        return cdiv(num_tokens, tokens_per_block) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReach:
    """Token t sees tokens of [t // chunk * chunk, t]."""

    chunk: int

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type. Raises ValueError for latent content, which no model chunks."""
        if is_latent:
            raise ValueError("chunked local attention over latent content is not defined; use KVContent")
        return SpecKind.CHUNKED_LOCAL

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return self

    @property
    def kept_whole(self) -> Reach:
        """As of WindowReach."""
        return FullReach(computes_chunk=self.chunk)

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once: one more where chunks do not start with a block."""
        num_tokens = self.chunk + limits.max_in_flight_tokens
        starts_inside = int(self.chunk % tokens_per_block != 0)
        return min(cdiv(num_tokens, tokens_per_block) + starts_inside, cdiv(limits.max_model_len, tokens_per_block))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetainedPromptReach:
    """Every token sees the whole prompt and the last `window` generated tokens (reference sliding-window attention)."""

    window: int

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type. Raises ValueError for latent content, which no model combines with it."""
        if is_latent:
            raise ValueError("a retained prompt over latent content is not defined; use KVContent")
        return SpecKind.RETAINED_PROMPT

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return self

    @property
    def kept_whole(self) -> Reach:
        """Itself: no other layer keeps the same blocks."""
        return self

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """As of FullReach: the prompt may be as long as the model allows."""
        return cdiv(limits.max_model_len, tokens_per_block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderReach:
    """Cross-attention: every token sees the encoder's whole input, whose blocks are taken once."""

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type."""
        del is_latent
        return SpecKind.CROSS_ATTENTION

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return self

    @property
    def kept_whole(self) -> Reach:
        """It is."""
        return self

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        return cdiv(limits.max_num_encoder_tokens, tokens_per_block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoReach:
    """Attention of an encoder: all in one forward pass, so no block is ever kept."""

    def kind(self, *, is_latent: bool) -> SpecKind:
        """Cache type."""
        del is_latent
        return SpecKind.ENCODER_ONLY

    @property
    def storage(self) -> Reach:
        """This, as far as the ledger is concerned."""
        return self

    @property
    def kept_whole(self) -> Reach:
        """There is nothing to keep."""
        return self

    def max_held_blocks(self, tokens_per_block: int, limits: SequenceLimits) -> int:
        """None."""
        del tokens_per_block, limits
        return 0


Reach = FullReach | WindowReach | ChunkReach | RetainedPromptReach | EncoderReach | NoReach
