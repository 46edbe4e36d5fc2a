"""Sampling parameters of every row as arrays, so that a step's rows are picked with one index.

Owns these arrays; the worker sets a row when it starts. What few rows use (stop ids, biases) is kept aside.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.request import BoolArray, Float32Array, Int32Array, SamplingParams
from blockferry.engine.wire import NewRow

GREEDY_BELOW = 1e-5
NO_LOGPROBS = -1


class SamplingState:
    """One entry per row; undefined for rows that hold no sequence."""

    def __init__(self, max_rows: int) -> None:
        self.seed = np.zeros(max_rows, np.uint64)
        self.temperature: Float32Array = np.zeros(max_rows, np.float32)
        self.top_k: Int32Array = np.zeros(max_rows, np.int32)
        self.top_p: Float32Array = np.ones(max_rows, np.float32)
        self.min_p: Float32Array = np.zeros(max_rows, np.float32)
        self.repetition_penalty: Float32Array = np.ones(max_rows, np.float32)
        self.presence_penalty: Float32Array = np.zeros(max_rows, np.float32)
        self.frequency_penalty: Float32Array = np.zeros(max_rows, np.float32)
        self.min_tokens: Int32Array = np.zeros(max_rows, np.int32)
        self.num_logprobs: Int32Array = np.full(max_rows, NO_LOGPROBS, np.int32)
        self.num_prompt_logprobs: Int32Array = np.full(max_rows, NO_LOGPROBS, np.int32)
        # what a row makes of the sampler's work; a step without any takes the short path
        self.is_random: BoolArray = np.zeros(max_rows, np.bool_)
        self.is_filtered: BoolArray = np.zeros(max_rows, np.bool_)  # top-k or top-p
        self.is_penalised: BoolArray = np.zeros(max_rows, np.bool_)
        self.is_edited: BoolArray = np.zeros(max_rows, np.bool_)  # biases or min_tokens
        self.stop_token_ids: dict[int, Int32Array] = {}
        self.bias_token_ids: dict[int, Int32Array] = {}
        self.biases: dict[int, Float32Array] = {}

    def assign(self, new_row: NewRow) -> None:
        """Start a row. Its seed must be set."""
        row, params = new_row.row, new_row.sampling
        assert params.seed is not None, f"row {row} came without a seed"
        self.seed[row] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs
        # a row that resumes with output reported its prompt before it produced any
        reports_prompt = params.num_prompt_logprobs is not None and len(new_row.token_ids) == new_row.num_prompt_tokens
        self.num_prompt_logprobs[row] = (params.num_prompt_logprobs or 0) if reports_prompt else NO_LOGPROBS
        self._classify(row, params)

    def _classify(self, row: int, params: SamplingParams) -> None:
        self.is_random[row] = params.temperature >= GREEDY_BELOW
        self.is_filtered[row] = self.is_random[row] and (params.top_k > 0 or params.top_p < 1.0)
        self.is_penalised[row] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        masks_stops = params.min_tokens > 0 and bool(params.stop_token_ids)
        self.is_edited[row] = masks_stops or bool(params.logit_bias)
        self.stop_token_ids[row] = np.asarray(params.stop_token_ids, np.int32)
        self.bias_token_ids[row] = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        self.biases[row] = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
