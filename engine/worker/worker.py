"""One rank of an instance: keeps rows and block tables in step with the scheduler and executes its plans.

Owns the rows, model and pages of its process. Knows no sockets and no Ray; one
thread, the model thread, calls it. Life: Worker(spec) -> load() -> init_cache() -> execute()... -> close().
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.connectors.base import PoolLayout
from blockferry.connectors.compute_progress import ComputeProgress
from blockferry.engine.config import Device
from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_families import kv_head_span
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.layers import Communicator
from blockferry.engine.models.loader import fingerprint
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.models.registry import ModelParts, load_drafter, load_model
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.weights import Placement
from blockferry.engine.request import Int32Array
from blockferry.engine.spec_decode.acceptance import Targets, accept, targets_of
from blockferry.engine.spec_decode.base import DraftProposer, VerifiedStep
from blockferry.engine.spec_decode.mtp import DraftPages
from blockferry.engine.wire import StepPlan, StepResult
from blockferry.engine.worker.backends import (
    TORCH_DTYPES,
    attention_backend,
    block_ops,
    latent_backend,
    layer_compute,
    layer_ops,
    state_ops,
)
from blockferry.engine.worker.cache_scales import scaled_layouts, scales_in, stored_scales
from blockferry.engine.worker.calibration import (
    ObservedAttention,
    ObservedLatentAttention,
    calibration_plan,
    calibration_steps,
    no_magnitudes,
    scales_of,
)
from blockferry.engine.worker.inputs import build_inputs, encoder_input
from blockferry.engine.worker.layer_reports import LayerReports
from blockferry.engine.worker.live_rows import LiveRows
from blockferry.engine.worker.model_runner import LayerByLayer, LayerCompute, ModelRunner
from blockferry.engine.worker.outputs import Drawn, OutputStage, nothing_drawn
from blockferry.engine.worker.page_views import PageViews
from blockferry.engine.worker.paged_caches import PagedCaches, StagePages
from blockferry.engine.worker.parallel import LoneCommunicator, Parallel, join
from blockferry.engine.worker.pool_layouts import HeldHeads, pool_layouts
from blockferry.engine.worker.pool_memory import Allocate, make_memory, page_dtypes
from blockferry.engine.worker.proposers import ProposerParts, make_proposer
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.state_inputs import settle_states
from blockferry.engine.worker.step_clock import StepClock, StepPart
from blockferry.engine.worker.warm_up import warm_up_plans
from blockferry.kernels.fp8 import CacheScales

_NO_TOKENS: Int32Array = np.empty(0, np.int32)

MakeProposer = Callable[[ProposerParts], DraftProposer]


class Worker:
    """Executes StepPlans strictly in order."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        join: Callable[[WorkerSpec], Parallel] = join,
        make_proposer: MakeProposer = make_proposer,
        step_clock: StepClock | None = None,
    ) -> None:
        """Sets torch's thread count, so make it before any other use of torch in the process.

        `join` links this rank to the others of its instance, `make_proposer` says who drafts tokens, and `step_clock`
        sums up where steps' time goes, for whoever gave it.
        """
        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self._join = join
        self._make_proposer = make_proposer
        self._step_clock = step_clock or StepClock()
        self.progress = ComputeProgress()  # which layers of which step are computed, for transfers
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._device = torch.device("cpu" if spec.device is Device.CPU else f"cuda:{spec.device_index}")
        self._live = LiveRows(spec)
        self._parallel: Parallel | None = None
        self._model: Decoder | None = None
        self._drafter: Drafter | None = None
        self._cache: _Cache | None = None

    def load(self) -> None:
        """Join the instance's other ranks and read this rank's weights. Raises ModelLoadError, RankLost.

        A rank that fails while it reads keeps no other one waiting: reading needs nobody.
        """
        self._parallel = self._join(self.spec)
        self._model, self._drafter = _load(self.spec, self._device, self._parallel.tensor)

    @property
    def model(self) -> Decoder:
        """The loaded model."""
        assert self._model is not None, "load() comes first"
        return self._model

    def fingerprint(self) -> str:
        """What the model and its draft head are, for the connector's handshake; equal wherever the files are."""
        head = None if self.spec.speculation is None else self.spec.speculation.head_path
        folders = [self.spec.model_path] if head is None else [self.spec.model_path, head]
        return "+".join(map(fingerprint, folders))

    def layouts(self) -> tuple[PoolLayout, ...]:
        """Where every page lies that may be ferried, once init_cache() made them."""
        assert self._cache is not None, "init_cache() comes first"
        layouts = pool_layouts(
            self._cache.plan.stages[self.spec.pp_rank],
            order=self.spec.layout,
            dtype=self.spec.dtype.value,
            kv_heads=HeldHeads(span=self._kv_heads, num_copies=self._num_kv_copies),
            tp_rank=self.spec.tp_rank,
            tp_size=self.spec.tp_size,
        )
        is_fp8 = self.spec.cache_dtype is CacheDType.FP8
        return scaled_layouts(layouts, self._cache.scales) if is_fp8 else layouts

    @torch.inference_mode()
    def take_scales(self, layouts: Sequence[PoolLayout]) -> None:
        """The scales that these say, of this rank's layers in fp8, instead of its own. Before anything is cached."""
        assert self._cache is not None, "init_cache() comes first"
        for layer_id, scales in scales_in(layouts).items():
            self._cache.scales[layer_id].k_K.copy_(scales.k_K)
            self._cache.scales[layer_id].v_K.copy_(scales.v_K)

    def init_cache(self, plan: InstancePlan, allocate: Allocate) -> None:
        """Make this rank's pool of the plan in memory from allocate(num_bytes), which a GPU's pool does not call.

        A cache in fp8 takes its scales from the checkpoint, or computes a fixed prompt for them: all ranks at once.
        """
        device, cache_dtype = self.spec.device, self.spec.cache_dtype
        scales = self._find_scales(plan) if cache_dtype is CacheDType.FP8 else {}
        views = self._views(plan, allocate, cache_dtype)
        pages = StagePages.of(plan.stages[self.spec.pp_rank], plan.model, views.layers, scales)
        caches = PagedCaches(pages, attention_backend(device, cache_dtype), latent_backend(device, cache_dtype))
        reports = LayerReports(self.progress, plan.model.layer_numbers)
        layers = layer_compute(device, self.model, caches, reports.layer_done)
        self._open(plan, views, caches=caches, layers=layers, scales=scales, reports=reports)

    def _find_scales(self, plan: InstancePlan) -> Mapping[int, CacheScales]:
        """Of every layer that attends, by layer id; from calibration, of this stage's.

        Layers that draft are asked for by themselves, so that the model's scales are the same with and without them.
        """
        attending = {i: spec for i, spec in enumerate(plan.model.layers) if isinstance(spec, AttentionSpec)}
        drafting = {i: attending.pop(i) for i in plan.model.draft_layer_ids}
        stored, of_drafts = (
            stored_scales(
                self.spec.model_path, wanted, plan.model.layer_numbers, kv_heads=self._kv_heads, device=self._device
            )
            for wanted in (attending, drafting)
        )
        if stored is not None and of_drafts is not None:
            return {**stored, **of_drafts}
        return {**self._calibrate(), **(stored or {}), **(of_drafts or {})}

    def _calibrate(self) -> Mapping[int, CacheScales]:
        header = self.model.header
        plan = calibration_plan(self.spec, header)
        views = self._views(plan, _zeroed, CacheDType.AUTO)
        magnitudes = no_magnitudes(plan, views.layers)
        pages = StagePages.of(plan.stages[self.spec.pp_rank], plan.model, views.layers, magnitudes)
        attention = ObservedAttention(attention_backend(self.spec.device))
        caches = PagedCaches(pages, attention, ObservedLatentAttention(latent_backend(self.spec.device)))
        compute = LayerByLayer(self.model, caches)  # no tape, which would pass by the observers
        reports = LayerReports(self.progress, plan.model.layer_numbers)
        self._open(plan, views, caches=caches, layers=compute, scales={}, reports=reports)
        for step in calibration_steps(self.spec, plan, header):
            self.execute(step)
        return scales_of(magnitudes)

    def _views(self, plan: InstancePlan, allocate: Allocate, cache_dtype: CacheDType) -> PageViews:
        stage = plan.stages[self.spec.pp_rank]
        return PageViews(
            stage,
            make_memory(stage.pool_bytes, device=self._device, allocate=allocate),
            layout=self.spec.layout,
            dtypes=page_dtypes(stage, self._dtype, cache_dtype),
            num_kv_heads=len(self._kv_heads),
            block_ops=block_ops(self.spec.device),
        )

    def _open(
        self,
        plan: InstancePlan,
        views: PageViews,
        *,
        caches: PagedCaches,
        layers: LayerCompute,
        scales: Mapping[int, CacheScales],
        reports: LayerReports,
    ) -> None:
        """Make ready to execute plans in a pool."""
        assert self._parallel is not None, "load() comes first"
        hidden_shape = (self.spec.max_num_batched_tokens, self.model.header.hidden_size)
        runner = ModelRunner(
            self.model,
            layers,
            parallel=self._parallel,
            hidden_TE=torch.empty(hidden_shape, dtype=self._dtype, device=self._device),
        )
        self._live.open(plan.ledger, plan.model)
        self._cache = _Cache(
            plan=plan,
            views=views,
            runner=runner,
            output=OutputStage(runner, self._live.table, self._live.sampling),
            proposer=self._make_proposer(self._proposer_parts(caches)),
            scales=scales,
            reports=reports,
        )

    def _proposer_parts(self, caches: PagedCaches) -> ProposerParts:
        pages = DraftPages(
            caches=caches, groups=self._live.groups, max_model_len=self.spec.max_model_len, device=self._device
        )
        return ProposerParts(spec=self.spec, rows=self._live.table, drafter=self._drafter, pages=pages)

    def warm_up(self) -> None:
        """Compile whatever the first request would have to wait for. After init_cache(); all ranks at once."""
        assert self._cache is not None, "init_cache() comes first"
        for plan in warm_up_plans(self.spec, self._cache.plan.ledger, self._cache.plan.model.num_encoder_tokens):
            self.execute(plan)

    def reset(self) -> None:
        """Forget every row and how far steps were computed, for another scheduler. While no plan is executed."""
        for row in range(self.spec.max_rows):
            self._live.forget(row)
        self.progress.reset()

    @property
    def _kv_heads(self) -> Span:
        config = ModelConfig(self.model.header.values)
        return kv_head_span(config, tp_rank=self.spec.tp_rank, tp_size=self.spec.tp_size)

    @property
    def _num_kv_copies(self) -> int:
        """Tensor-parallel ranks with the same KV heads as this one."""
        config, tp_size = ModelConfig(self.model.header.values), self.spec.tp_size
        spans = [kv_head_span(config, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
        return spans.count(self._kv_heads)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Apply and compute one plan; a result on the sampler rank, None on the others."""
        assert self._cache is not None, "init_cache() comes first"
        started_s = time.perf_counter()
        self._step_clock.begin()
        self._cache.reports.begin(plan.step_id)
        self._apply(plan)
        result = self._compute(plan) if len(plan.rows) else StepResult(step_id=plan.step_id, token_ids=_NO_TOKENS)
        self._cache.reports.end()
        if not self.spec.is_sampler:
            return None
        return dataclasses.replace(result, duration_s=time.perf_counter() - started_s)

    def _apply(self, plan: StepPlan) -> None:
        """Rows and pages as the plan wants them before it is computed."""
        self._live.apply(plan)
        if len(plan.copies) or len(plan.zero):
            assert self._cache is not None, "init_cache() comes first"
            for group in range(len(self._live.groups)):
                self._cache.views.zero_blocks(group, plan.zero[plan.zero[:, 0] == group, 1])
                self._cache.views.copy_blocks(group, plan.copies[plan.copies[:, 0] == group, 1:])

    def _compute(self, plan: StepPlan) -> StepResult:
        """Compute the rows, draw, and append what counts; the result means something on the sampler rank only."""
        cache, live = self._cache, self._live
        assert cache is not None, "init_cache() comes first"
        for row, input_N in live.take_unencoded(plan):  # one by one, to bound memory
            cache.runner.encode(encoder_input(row, input_N, live.groups, device=self._device))
        inputs = build_inputs(plan, live.table, live.groups, device=self._device)
        targets = targets_of(plan, inputs.last_token_R)
        hidden_TE = cache.runner.forward(inputs)
        self._step_clock.end(StepPart.FORWARD)
        logprobs = [] if hidden_TE is None else cache.output.prompt_logprobs(plan, inputs, hidden_TE)
        drawn = self._draw(targets, hidden_TE)
        accepted = accept(targets, drawn.token_ids_N)
        live.append(plan.rows[plan.sample], accepted)
        settle_states(plan, accepted.num_tokens_S, live.states, cache.views)
        logprobs += cache.output.drawn_logprobs(targets, drawn, accepted)
        self._step_clock.end(StepPart.SAMPLING)
        step = VerifiedStep(plan=plan, hidden_TE=hidden_TE, inputs=inputs, num_tokens_S=accepted.num_tokens_S)
        proposals = cache.proposer.propose(step)
        self._step_clock.end(StepPart.DRAFTING)
        return StepResult(
            step_id=plan.step_id,
            token_ids=accepted.token_ids,
            num_tokens=accepted.num_tokens_S if len(plan.num_drafts) else _NO_TOKENS,
            proposals=proposals,
            logprobs=tuple(logprobs),
        )

    def _draw(self, targets: Targets, hidden_TE: torch.Tensor | None) -> Drawn:
        """The sampler rank's tokens, on every rank; hidden states are the last stage's."""
        assert self._parallel is not None, "load() comes first"
        assert self._cache is not None, "init_cache() comes first"
        if not len(targets):
            return nothing_drawn(targets)
        drawn = nothing_drawn(targets) if hidden_TE is None else self._cache.output.draw(targets, hidden_TE)
        return dataclasses.replace(drawn, token_ids_N=self._parallel.share_tokens(drawn.token_ids_N))

    def close(self) -> None:
        """Leave the instance; idempotent."""
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None


def check_checkpoint(spec: WorkerSpec) -> None:
    """Hold config.json, and the names and shapes of a rank's tensors, against the model. Raises as Worker.load.

    Reads no weights and needs no other rank, so that no rank joins and waits for one that could not load.
    """
    _load(spec, torch.device("meta"), LoneCommunicator())


@torch.inference_mode()
def _load(spec: WorkerSpec, device: torch.device, communicator: Communicator) -> tuple[Decoder, Drafter | None]:
    """The rank's part of the model, and of the modules that draft for it."""
    path, place = spec.model_path, spec.place
    placement = Placement(dtype=TORCH_DTYPES[spec.dtype], device=device, max_model_len=spec.max_model_len)
    parts = ModelParts(ops=layer_ops(spec.device), state_ops=state_ops(spec.device), communicator=communicator)
    model = load_model(path, place, placement=placement, parts=parts)
    drafter = load_drafter(model, path, speculation=spec.speculation, place=place, placement=placement, parts=parts)
    return model, drafter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """What exists once the pool does."""

    plan: InstancePlan
    views: PageViews
    runner: ModelRunner
    output: OutputStage
    proposer: DraftProposer
    scales: Mapping[int, CacheScales]  # by layer id, where the cache is fp8
    reports: LayerReports


def _zeroed(num_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(num_bytes, np.uint8)
