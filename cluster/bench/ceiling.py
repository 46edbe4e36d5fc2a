"""What the machine could do at best: the model's linear layers alone, held against a measured server.

Loads the deployment's model into this process, which must have the cores to itself while it times: the server is
idle then. Only a lone rank has this bound; with more ranks the collectives set another.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockferry.cluster.bench.report import Result
from blockferry.cluster.bench.serve import Measured
from blockferry.engine.config import DeploymentConfig
from blockferry.engine.worker.ceiling import linear_ceiling
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker

NUM_REPEATS = 15


class LinearCeiling:
    """Rows that compare a measurement with its linear layers; a CeilingRows."""

    def __init__(self, config: DeploymentConfig) -> None:
        """Loads the weights. Raises ModelLoadError; ValueError for a deployment of several ranks an instance."""
        shape = config.instances[0]
        if any(one.tensor_parallel * one.pipeline_parallel > 1 for one in config.instances):
            raise ValueError("the linear-layer ceiling needs instances of one rank; measure without --ceiling")
        self._num_chunk_tokens = shape.scheduler.max_num_batched_tokens
        worker = Worker(
            WorkerSpec(
                model_path=config.model.path,
                dtype=config.model.dtype,
                max_model_len=config.model.max_model_len,
                max_rows=1,
                max_num_batched_tokens=self._num_chunk_tokens,
                device=config.device,
                num_threads=shape.num_threads,
            )
        )
        worker.load()
        self._model = worker.model
        self._seconds: dict[tuple[int, int], float] = {}

    def __call__(self, measured: Measured) -> Sequence[Result]:
        """Ceiling and ratio of decoding alone and of the whole measurement."""
        config = measured.config
        if config.concurrency is None or config.rate_per_s is not None:
            return []  # an open loop's batch size is nobody's choice
        rows = min(config.concurrency, config.num_prompts)
        decode_s = self._pass_s(rows, rows)
        prompt_s = measured.num_prompt_tokens * self._prefill_s_per_token(config.input_len)
        num_steps = (measured.num_output_tokens - len(measured.succeeded)) / rows
        bound = measured.num_output_tokens / (prompt_s + num_steps * decode_s)
        figures = {
            "linear_prefill_ceiling": (1 / self._prefill_s_per_token(config.input_len), "tok/s"),
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

    def _prefill_s_per_token(self, input_len: int) -> float:
        """Of full chunks, each of which holds the ends of so many prompts."""
        num_tokens = self._num_chunk_tokens
        return self._pass_s(num_tokens, max(1, num_tokens // input_len)) / num_tokens

    def _pass_s(self, num_rows: int, num_logit_rows: int) -> float:
        key = (num_rows, num_logit_rows)
        if key not in self._seconds:
            self._seconds[key] = linear_ceiling(
                self._model, num_rows=num_rows, repeats=NUM_REPEATS, num_logit_rows=num_logit_rows
            )
        return self._seconds[key]
