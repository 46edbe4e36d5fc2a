"""One rank of an instance: keeps rows and block tables in step with the scheduler and executes its plans.

Owns the rows, tables, sampling parameters, model and pages of its process. Knows no sockets and no Ray; one
thread, the model thread, calls it. Life: Worker(spec) -> load() -> init_cache() -> execute()... -> close().
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from blockferry.connectors.base import PoolLayout
from blockferry.engine.config import Device
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.models.llama import Placement
from blockferry.engine.models.loader import fingerprint
from blockferry.engine.models.registry import CausalModel, load_model
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import StepPlan, StepResult
from blockferry.engine.worker.backends import TORCH_DTYPES, attention_backend, layer_compute, layer_ops
from blockferry.engine.worker.block_table import apply_deltas
from blockferry.engine.worker.inputs import build_inputs
from blockferry.engine.worker.kv_cache import Allocate, KVPool, make_pool, page_bytes
from blockferry.engine.worker.model_runner import ModelRunner
from blockferry.engine.worker.outputs import NOTHING, OutputStage, StepOutcome, num_sampled
from blockferry.engine.worker.parallel import Parallel, join
from blockferry.engine.worker.sampling_state import SamplingState
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.warm_up import warm_up_plans


class Worker:
    """Executes StepPlans strictly in order."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Sets torch's thread count, so make it before any other use of torch in the process."""
        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._device = torch.device("cpu" if spec.device is Device.CPU else f"cuda:{spec.device_index}")
        # one more than the longest sequence: its last sampled token is never computed
        self._rows = RowTable(max_rows=spec.max_rows, max_model_len=spec.max_model_len + 1)
        max_blocks = -(-spec.max_model_len // spec.block_size) + 1
        self._tables = [BlockTable(max_rows=spec.max_rows, max_blocks=max_blocks)]
        self._sampling = SamplingState(spec.max_rows)
        self._parallel: Parallel | None = None
        self._model: CausalModel | None = None
        self._cache: _Cache | None = None

    def load(self) -> None:
        """Join the instance's other ranks and read this rank's weights. Raises ModelLoadError."""
        placement = Placement(dtype=self._dtype, device=self._device, max_model_len=self.spec.max_model_len)
        self._parallel = join(self.spec)
        with torch.inference_mode():
            self._model = load_model(
                self.spec.model_path,
                self.spec.place,
                placement=placement,
                ops=layer_ops(self.spec.device),
                communicator=self._parallel.tensor,
            )

    @property
    def model(self) -> CausalModel:
        """The loaded model."""
        assert self._model is not None, "load() comes first"
        return self._model

    def fingerprint(self) -> str:
        """What the model is, for the connector's handshake; equal on every host with the same checkpoint."""
        return fingerprint(self.spec.model_path)

    def page_bytes(self) -> int:
        """Bytes of one block on this rank, all its layers."""
        return page_bytes(self._layout_of(num_blocks=1))

    def layout(self) -> PoolLayout:
        """Where every page lies, once init_cache() made them."""
        assert self._cache is not None, "init_cache() comes first"
        return self._cache.pool.layout

    def init_cache(self, num_blocks: int, allocate: Allocate) -> None:
        """Make the pool of num_blocks blocks, the null block included, in memory from allocate(num_bytes)."""
        assert self._parallel is not None, "load() comes first"
        pool = make_pool(self._layout_of(num_blocks), self._dtype, device=self._device, allocate=allocate)
        hidden_shape = (self.spec.max_num_batched_tokens, self.model.config.hidden_size)
        runner = ModelRunner(
            self.model,
            layer_compute(self.spec.device, self.model, attention_backend(self.spec.device), pool.layers),
            parallel=self._parallel,
            hidden_TE=torch.empty(hidden_shape, dtype=self._dtype, device=self._device),
        )
        self._cache = _Cache(pool=pool, runner=runner, output=OutputStage(runner, self._rows, self._sampling))

    def warm_up(self) -> None:
        """Compile whatever the first request would have to wait for. After init_cache(); all ranks at once."""
        for plan in warm_up_plans(self.spec, num_blocks=self.layout().num_blocks):
            self.execute(plan)

    def _layout_of(self, num_blocks: int) -> PoolLayout:
        shard, config = self.model.shard, self.model.config
        return PoolLayout(
            order=self.spec.layout,
            num_blocks=num_blocks,
            block_size=self.spec.block_size,
            layer_ids=tuple(range(shard.layers.start, shard.layers.stop)),
            head_start=shard.heads.kv.start,
            num_heads=len(shard.heads.kv),
            content_bytes=2 * config.head_dim * self.spec.dtype.num_bytes,
            dtype=self.spec.dtype.value,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Apply and compute one plan; a result on the sampler rank, None on the others."""
        started_s = time.perf_counter()
        self._apply(plan)
        outcome = self._compute(plan) if len(plan.rows) else NOTHING
        if not self.spec.is_sampler:
            return None
        return StepResult(
            step_id=plan.step_id,
            token_ids=outcome.token_ids,
            logprobs=outcome.logprobs,
            duration_s=time.perf_counter() - started_s,
        )

    def _apply(self, plan: StepPlan) -> None:
        """Rows, tables and pages as the plan wants them before it is computed."""
        for row in plan.freed_rows.tolist():
            self._rows.clear(row)
            for table in self._tables:
                table.clear(row)
        for new_row in plan.new_rows:
            self._rows.assign(new_row.row, new_row.token_ids, num_prompt_tokens=new_row.num_prompt_tokens)
            self._sampling.assign(new_row)
        apply_deltas(self._tables, plan.deltas)
        if len(plan.copies) or len(plan.zero):
            assert self._cache is not None, "init_cache() comes first"
            self._cache.pool.zero_blocks(plan.zero[:, 1])  # one pool for its one group
            self._cache.pool.copy_blocks(plan.copies[:, 1:])

    def _compute(self, plan: StepPlan) -> StepOutcome:
        cache, parallel = self._cache, self._parallel
        assert parallel is not None, "load() comes first"
        assert cache is not None, "init_cache() comes first"
        inputs = build_inputs(plan, self._rows, self._tables, block_size=self.spec.block_size, device=self._device)
        hidden_TE = cache.runner.forward(inputs)
        outcome = StepOutcome(token_ids=np.zeros(num_sampled(plan), np.int32))
        if hidden_TE is not None:
            outcome = cache.output.finish(plan, inputs, hidden_TE)
        if not len(outcome.token_ids):
            return outcome
        token_ids = parallel.share_tokens(outcome.token_ids)
        sampled_rows = plan.rows[plan.sample]
        positions = plan.num_computed[plan.sample] + plan.num_scheduled[plan.sample]
        self._rows.token_ids[sampled_rows, positions] = token_ids
        self._rows.num_tokens[sampled_rows] = positions + 1
        return outcome

    def close(self) -> None:
        """Leave the instance; idempotent."""
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """What exists once the pool does."""

    pool: KVPool
    runner: ModelRunner
    output: OutputStage
