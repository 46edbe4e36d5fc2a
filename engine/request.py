"""What a caller asks for and what they get back: plain values shared by API, scheduler and workers.

Owns no state; never imports torch or Ray.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class FinishReason(enum.StrEnum):
    """Why a request ended; the first three are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Defaults are greedy-free OpenAI defaults; temperature 0 is greedy.

    `seed` None draws from a per-request random seed chosen at admission. Randomness is a function of
    (seed, position) only, so preemption, recompute and hand-off repeat the same draw.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # with EOS ids already merged in unless ignore_eos
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    num_logprobs: int | None = None  # None: none; 0: the sampled token only; n: top n as well
    num_prompt_logprobs: int | None = None


def _no_tokens() -> Int32Array:
    return np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to complete. `handle` is the caller's unique number; outputs carry it.

    A request that lost its instance or its scheduler comes again with `output_token_ids`: the tokens that were drawn
    for it and passed on already. They are computed like the prompt and count as output everywhere else.
    """

    request_id: str
    handle: int
    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic() of the scheduler's host at receipt; FCFS order
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    encoder_token_ids: Int32Array | None = None  # of an encoder-decoder, whose decoder continues the prompt
    output_token_ids: Int32Array = dataclasses.field(default_factory=_no_tokens)  # [num drawn before]

    @property
    def num_input_tokens(self) -> int:
        """Tokens that the caller wrote: an encoder's where there is one, as its decoder's prompt is the model's own."""
        return len(self.prompt_token_ids if self.encoder_token_ids is None else self.encoder_token_ids)

    @property
    def given_token_ids(self) -> Int32Array:
        """What is to be computed before the next token can be drawn: the prompt and the output so far."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    @property
    def num_given_tokens(self) -> int:
        """Length of given_token_ids."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one position: the token itself first, then the top ones, best first."""

    token_ids: Int32Array  # [1 + k]
    logprobs: Float32Array  # [1 + k]
    rank: int  # of the token itself, 1 = most likely


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What a finished request cost; durations in seconds, all measured on the scheduler's clock."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queued_s: float  # arrival to first scheduled
    prefill_s: float  # first scheduled to first token
    transfer_s: float  # from the computed prompt to the last byte's arrival; 0.0 when nothing was ferried
    transfer_bytes: int
    transfer_blocks: int
    transfer_saved_bytes: int  # of the prompt's keys and values: the decode side had them, or never reads them
    num_loaded_tokens: int = 0  # not computed but loaded from memory or disk outside of the pool
    num_drafted_tokens: int = 0  # that were proposed and verified
    num_accepted_tokens: int = 0  # of those: the model drew the same
    num_resumes: int = 0  # how often it lost its instance or scheduler and went on elsewhere; the client counts
