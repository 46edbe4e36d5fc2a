"""Token counts as OpenAI's `usage` objects."""

from __future__ import annotations

from typing import Any

from blockferry.cluster.api.generation import Generation
from blockferry.cluster.api.schemas import StreamOptions
from blockferry.cluster.api.sequence import Delta


class UsageCounter:
    """Counts one HTTP request's tokens from its deltas."""

    def __init__(self, generation: Generation) -> None:
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._num_choices = generation.num_choices
        self._num_output_tokens = [0] * len(generation.runs)
        self._num_cached_tokens = [0] * len(generation.prompts)

    def add(self, delta: Delta) -> None:
        """Take a delta's counts over."""
        self._num_output_tokens[delta.index] = delta.num_output_tokens
        if delta.stats is not None:
            prompt = delta.index // self._num_choices
            cached = self._num_cached_tokens
            cached[prompt] = max(cached[prompt], delta.stats.num_cached_tokens)

    def usage(self) -> dict[str, Any]:
        """The object; a prompt counts once however many choices continue it."""
        num_output_tokens = sum(self._num_output_tokens)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)},
        }


class StreamUsage:
    """Where a stream carries usage: in a last chunk, in every chunk, or nowhere."""

    def __init__(self, options: StreamOptions | None, counter: UsageCounter) -> None:
        self._options = options or StreamOptions()
        self._counter = counter

    def of_chunk(self) -> dict[str, Any]:
        """What a chunk with choices says of usage: OpenAI writes null before the last one."""
        if not self._options.include_usage:
            return {}
        return {"usage": self._counter.usage() if self._options.continuous_usage_stats else None}

    def final_chunks(self) -> list[dict[str, Any]]:
        """The chunk without choices that closes the stream, when it was asked for."""
        if not self._options.include_usage:
            return []
        return [{"choices": [], "usage": self._counter.usage()}]
