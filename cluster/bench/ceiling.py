"""What the machine could do at best: the model's linear layers alone, held against a measured server.

They are timed in a process of their own on the deployment's Ray cluster, started like a worker, while the server is
idle. Only a lone rank has this bound; with more ranks the collectives set another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ray

from blockferry.cluster.actors import worker_environment
from blockferry.cluster.bench.report import Result
from blockferry.cluster.bench.serve import Measured
from blockferry.engine.config import DeploymentConfig
from blockferry.engine.worker.spec import WorkerSpec

NUM_REPEATS = 15
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Tokens through all layers, and how many of them through the head."""

    num_rows: int
    num_logit_rows: int


def time_passes(spec: WorkerSpec, passes: Sequence[Pass]) -> list[float]:
    """Median seconds of each pass on this process's threads; loads the weights first. Raises ModelLoadError."""
    from blockferry.engine.worker.ceiling import linear_ceiling  # torch: never in the process that measures
    from blockferry.engine.worker.worker import Worker

    worker = Worker(spec)
    worker.load()
    return [
        linear_ceiling(worker.model, num_rows=one.num_rows, repeats=NUM_REPEATS, num_logit_rows=one.num_logit_rows)
        for one in passes
    ]


class LinearCeiling:
    """Rows that compare a measurement with its linear layers; a CeilingRows."""

    def __init__(self, config: DeploymentConfig) -> None:
        """Needs a connection to Ray. Raises ValueError for a deployment of several ranks an instance."""
        if any(one.tensor_parallel * one.pipeline_parallel > 1 for one in config.instances):
            raise ValueError("the linear-layer ceiling needs instances of one rank; measure without --ceiling")
        shape = config.instances[0]
        self._spec = WorkerSpec(
            model_path=config.model.path,
            dtype=config.model.dtype,
            max_model_len=config.model.max_model_len,
            max_rows=1,
            max_num_batched_tokens=shape.scheduler.max_num_batched_tokens,
            device=config.device,
            num_threads=shape.num_threads,
        )
        self._seconds: dict[Pass, float] = {}

    def __call__(self, measured: Measured) -> Sequence[Result]:
        """Ceiling and ratio of decoding alone and of the whole measurement."""
        config = measured.config
        if config.concurrency is None or config.rate_per_s is not None:
            return []  # an open loop's batch size is nobody's choice
        rows = min(config.concurrency, config.num_prompts)
        num_chunk_tokens = self._spec.max_num_batched_tokens
        decode = Pass(num_rows=rows, num_logit_rows=rows)
        prefill = Pass(num_rows=num_chunk_tokens, num_logit_rows=max(1, num_chunk_tokens // config.input_len))
        self._time([decode, prefill])
        decode_s, prefill_token_s = self._seconds[decode], self._seconds[prefill] / num_chunk_tokens
        num_steps = (measured.num_output_tokens - len(measured.succeeded)) / rows
        bound = measured.num_output_tokens / (measured.num_prompt_tokens * prefill_token_s + num_steps * decode_s)
        figures = {
            "linear_prefill_ceiling": (1 / prefill_token_s, "tok/s"),
            "linear_decode_ceiling": (rows / decode_s, "tok/s"),
            "linear_ceiling": (bound, "tok/s"),  # of the same prompts and outputs
            "ratio": (measured.num_output_tokens / measured.duration_s / bound, "1"),
        }
        gaps_s = sorted(gap_s for answer in measured.succeeded for gap_s in answer.itl_s)
        if gaps_s:
            step_s = gaps_s[len(gaps_s) // 2]
            figures["decode_throughput"] = (rows / step_s, "tok/s")
            figures["decode_ratio"] = (decode_s / step_s, "1")
        return [
            Result(name=name, params=config.params, unit=unit, runs=[value]) for name, (value, unit) in figures.items()
        ]

    def _time(self, passes: Sequence[Pass]) -> None:
        missing = [one for one in passes if one not in self._seconds]
        if not missing:
            return
        task: Any = ray.remote(time_passes)
        environment = {"env_vars": worker_environment(self._spec.num_threads)}
        timing = task.options(num_cpus=0, runtime_env=environment, max_retries=0).remote(self._spec, missing)
        self._seconds.update(zip(missing, ray.get(timing, timeout=TIMEOUT_S), strict=True))
