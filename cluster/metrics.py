"""Prometheus metrics of one API server, under vLLM's names with the prefix `blockferry:`.

Request metrics are counted here as outputs pass; what the engine counts (queues, blocks, preemptions) is shown
from its last status snapshot. Called on the server's event loop only.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from blockferry.cluster.draft_counts import ACCEPTED, DRAFTED, DRAFTS
from blockferry.engine.request import RequestStats

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_LATENCY_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST_LATENCY_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
TRANSFER_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BYTES_BUCKETS = tuple(1 << power for power in range(12, 37, 2))

PREFIX = "blockferry:"
EngineSnapshot = Mapping[str, Any]


class ServerMetrics:
    """Everything /metrics shows. Owns its registry, so that several servers can live in one process."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self.tokens = TokenMetrics(model_name)
        self._registry.register(self.tokens)
        self._success = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.resumes = self._counter("request_resumes", "Times that a request went on elsewhere, its instance lost.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS_S)
        self.tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request after its first.", TOKEN_LATENCY_BUCKETS_S
        )
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_LATENCY_BUCKETS_S)
        self.queue_s = self._histogram("request_queue_time_seconds", "Arrival to admission.", REQUEST_LATENCY_BUCKETS_S)
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds", "Admission to first token.", REQUEST_LATENCY_BUCKETS_S
        )
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "First to last token.", REQUEST_LATENCY_BUCKETS_S
        )
        self.inference_s = self._histogram(
            "request_inference_time_seconds", "Admission to last token.", REQUEST_LATENCY_BUCKETS_S
        )
        self.num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.num_output_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS
        )
        self.transfer_s = self._histogram(
            "kv_transfer_time_seconds",
            "From a computed prompt to the arrival of its last KV block.",
            TRANSFER_BUCKETS_S,
        )
        self.transfer_bytes = self._histogram(
            "kv_transfer_bytes", "Bytes of KV blocks ferried for a request.", BYTES_BUCKETS
        )
        self.transfer_saved_bytes = self._histogram(
            "kv_transfer_saved_bytes",
            "Bytes of a prompt's keys and values that the decode instance had, or never reads.",
            BYTES_BUCKETS,
        )

    def on_success(self, reason: str) -> None:
        """Count an ended request."""
        self._success.labels(self._model_name, reason).inc()

    def on_stats(self, stats: RequestStats, decode_s: float) -> None:
        """Record what the scheduler measured of an ended request."""
        self.resumes.inc(stats.num_resumes)
        self.queue_s.observe(stats.queued_s)
        self.prefill_s.observe(stats.prefill_s)
        self.inference_s.observe(stats.prefill_s + decode_s)
        if stats.transfer_blocks:
            self.transfer_s.observe(stats.transfer_s)
            self.transfer_bytes.observe(stats.transfer_bytes)
            self.transfer_saved_bytes.observe(stats.transfer_saved_bytes)

    def render(self, engine: EngineSnapshot | None) -> bytes:
        """The exposition text; `engine` is EngineClient.status(), None when it does not answer."""
        self._engine.snapshot = engine
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(PREFIX + name, text, ["model_name"], registry=self._registry)
        return family.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model_name)


class SequenceTimes:
    """The clock of one sequence: feeds the histograms as its outputs arrive."""

    def __init__(self, metrics: ServerMetrics, *, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._start_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._is_finished = False

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Tokens arrived together; the gap since the last ones is shared among them."""
        if not num_tokens:
            return
        metrics = self._metrics
        if not self._num_tokens:
            self._first_s = now_s
            metrics.ttft_s.observe(now_s - self._start_s)
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
        else:
            metrics.tokens.observe_gaps(now_s - self._last_s, num_tokens)
        metrics.tokens.num_generated += num_tokens
        self._num_tokens += num_tokens
        self._last_s = now_s

    def on_finish(self, reason: str, stats: RequestStats | None) -> None:
        """The sequence ended by itself."""
        metrics = self._metrics
        self._is_finished = True
        decode_s = self._last_s - self._first_s
        metrics.on_success(reason)
        metrics.e2e_s.observe(time.monotonic() - self._start_s)
        metrics.num_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.num_output_tokens.observe(self._num_tokens)
        metrics.decode_s.observe(decode_s)
        if self._num_tokens > 1:
            metrics.tpot_s.observe(decode_s / (self._num_tokens - 1))
        if stats is not None:
            metrics.on_stats(stats, decode_s)

    def close(self) -> None:
        """Count a sequence that was left before its end (disconnect, failure)."""
        if not self._is_finished:
            self._metrics.on_success("abort")


class TokenMetrics:
    """What is counted for every token: a count and a histogram without the locks of prometheus_client.

    Called on one event loop only; costs half a microsecond where Histogram.observe costs ten.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(TOKEN_LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0
        self.num_generated = 0

    def observe_gaps(self, gap_s: float, num_tokens: int) -> None:
        """Tokens that came together after a gap share it."""
        self._counts[bisect.bisect_left(TOKEN_LATENCY_BUCKETS_S, gap_s / num_tokens)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        labels = [self._model_name]
        counter = CounterMetricFamily(f"{PREFIX}generation_tokens", "Tokens generated.", labels=["model_name"])
        counter.add_metric(labels, self.num_generated)
        yield counter
        histogram = HistogramMetricFamily(
            f"{PREFIX}inter_token_latency_seconds", "Between two tokens of a request.", labels=["model_name"]
        )
        bounds = [*(str(float(bound)) for bound in TOKEN_LATENCY_BUCKETS_S), "+Inf"]
        histogram.add_metric(labels, list(zip(bounds, itertools.accumulate(self._counts))), self._sum_s)
        yield histogram


class _EngineCollector:
    """Shows the engine's snapshot: one series per instance, and what only the whole deployment has."""

    GAUGES = (
        ("num_requests_running", "num_running", "Requests being computed."),
        ("num_requests_waiting", "num_waiting", "Requests waiting to be computed."),
        ("kv_cache_usage_perc", "usage", "Share of KV blocks in use, 1 is all."),
        ("offload_memory_usage_perc", "offload_memory_usage", "Share of the memory tier in use, 1 is all."),
        ("offload_disk_usage_perc", "offload_disk_usage", "Share of the disk tier in use, 1 is all."),
        ("offload_num_loading", "offload_num_loading", "Requests whose blocks are being loaded."),
    )
    COUNTERS = (
        ("num_preemptions", "num_preemptions", "Preemptions."),
        ("prefix_cache_queries", "num_queried_tokens", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "num_hit_tokens", "Prompt tokens found in the prefix cache."),
        (DRAFTS, "speculation_num_drafts", "Times that drafted tokens of a request were verified."),
        (DRAFTED, "speculation_num_drafted", "Tokens drafted."),
        (ACCEPTED, "speculation_num_accepted", "Drafted tokens that were accepted."),
        ("offload_loaded_tokens", "offload_num_loaded_tokens", "Tokens loaded from tiers rather than computed."),
        ("offload_failed_loads", "offload_num_failed_loads", "Loads that failed or came too late."),
        ("offload_memory_stored_blocks", "offload_memory_stored_blocks", "KV blocks stored in memory."),
        ("offload_memory_loaded_blocks", "offload_memory_loaded_blocks", "KV blocks loaded from memory."),
        ("offload_disk_stored_blocks", "offload_disk_stored_blocks", "KV blocks copied to disk."),
        ("offload_disk_loaded_blocks", "offload_disk_loaded_blocks", "KV blocks loaded from disk."),
        ("offload_stored_bytes", "offload_store_bytes", "Bytes stored in memory, of all ranks."),
        ("offload_loaded_bytes", "offload_load_bytes", "Bytes loaded from memory, of all ranks."),
        ("offload_demoted_bytes", "offload_demote_bytes", "Bytes copied to disk, of all ranks."),
        ("offload_fetched_bytes", "offload_fetch_bytes", "Bytes loaded from disk, of all ranks."),
    )
    POSITION_COUNTERS = (
        (f"{DRAFTED}_per_pos", "drafted_per_position", "Tokens drafted, by their position in a step from 0."),
        (f"{ACCEPTED}_per_pos", "accepted_per_position", "Drafted tokens that were accepted, by position."),
    )
    LABELS = ("model_name", "engine", "role")

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.snapshot: EngineSnapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        snapshot = self.snapshot or {}
        if "prefix_cache" in snapshot:
            text = "Share of prompt tokens found in the prefix caches where prompts are computed, 1 is all."
            rate = GaugeMetricFamily(f"{PREFIX}prefix_cache_hit_rate", text, labels=["model_name"])
            rate.add_metric([self._model_name], float(snapshot["prefix_cache"]["hit_rate"]))
            yield rate
        instances = snapshot.get("instances", ())
        for name, key, text in self.GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=self.LABELS)
            self._fill(gauge, instances, key)
            yield gauge
        for name, key, text in self.COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=self.LABELS)
            self._fill(counter, instances, key)
            yield counter
        for name, key, text in self.POSITION_COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=(*self.LABELS, "position"))
            for instance in instances:
                for position, count in enumerate((instance.get("speculation") or {}).get(key, ())):
                    counter.add_metric([*self._labels(instance), str(position)], float(count))
            yield counter

    def _labels(self, instance: Mapping[str, Any]) -> list[str]:
        return [self._model_name, str(instance.get("instance_id", "")), str(instance.get("role", ""))]

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, instances: Any, key: str) -> None:
        for instance in instances:
            if key in instance:
                family.add_metric(self._labels(instance), float(instance[key]))
