"""One instance in this process, without Ray or sockets: its scheduler, the wire and its worker in turn, timed by part.

What is timed is decoding: from the first token's step on, whose prompt is computed before. Steps do not overlap, with
or without drafts: a request alone has nothing to overlap.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from blockferry.cluster.deployment import Deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.scheduler_host import InstanceSettings, make_instance
from blockferry.cluster.worker_settings import spec_of
from blockferry.engine.request import Int32Array, Request, SamplingParams
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.outputs import Route, StepOutput
from blockferry.engine.wire import StepPlan, StepResult, pack, plan_from_bytes, result_from_bytes
from blockferry.engine.worker.step_clock import StepClock, StepPart
from blockferry.engine.worker.worker import Worker

INSTANCE_ID = "bench"
_ROUTE = Route(prefill=INSTANCE_ID, decode=INSTANCE_ID)

Redraft = Callable[[StepPlan, StepResult], StepResult]
"""What becomes of a result's proposals before the scheduler sees them."""


def as_proposed(plan: StepPlan, result: StepResult) -> StepResult:
    """Leave the proposals alone."""
    del plan
    return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One request's tokens, and what they took after the first."""

    token_ids: list[int]
    num_steps: int
    total_s: float
    part_s: Mapping[StepPart, float]  # the rest is the scheduler's, and the wire
    drafted: NDArray[np.int64]  # [K]: steps that verified a draft at that position
    accepted: NDArray[np.int64]  # [K]

    @property
    def num_timed_tokens(self) -> int:
        """Tokens that total_s yielded."""
        return len(self.token_ids) - 1


class LocalInstance:
    """The deployment's first instance, of one rank. Loads its weights; one request at a time."""

    def __init__(self, deployment: Deployment, clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises ConfigError, ModelLoadError."""
        config, shape = deployment.config, deployment.config.instances[0]
        plan = plan_of(config.model, deployment.header, shape, where="instances[0]")
        self._clock = clock
        self._step_clock = StepClock(clock)
        self._worker = Worker(spec_of(config, shape), step_clock=self._step_clock)
        self._worker.load()
        self._worker.init_cache(plan, lambda num_bytes: np.zeros(num_bytes, np.uint8))
        self._worker.warm_up()
        settings = InstanceSettings(
            instance_id=INSTANCE_ID,
            role=shape.role,
            num_ranks=1,
            kv=plan.ledger,
            cache=shape.cache,
            scheduler=shape.scheduler,
            max_num_encoder_tokens=plan.model.num_encoder_tokens,
        )
        self._central = CentralScheduler([make_instance(settings, max_model_len=config.model.max_model_len)])
        self._num_drafts = 0 if shape.scheduler.speculation is None else shape.scheduler.speculation.num_tokens
        self._num_requests = 0

    def decode(self, prompt: Int32Array, sampling: SamplingParams, redraft: Redraft = as_proposed) -> Decoded:
        """Run one request to its end."""
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            handle=self._num_requests,
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_s=0.0,
        )
        self._central.add(request, _ROUTE)
        token_ids: list[int] = []
        num_steps, total_s = 0, 0.0
        drafted, accepted = np.zeros((2, self._num_drafts), np.int64)
        is_over = False
        while not is_over:
            started_s = self._clock()
            plan, result, output = self._step(redraft)
            if not token_ids:
                self._step_clock.reset()
            else:
                total_s += self._clock() - started_s
                num_steps += 1
                if len(plan.num_drafts):
                    drafted[: plan.num_drafts[0]] += 1
                    accepted[: len(result.token_ids) - 1] += 1
            token_ids += output.token_ids.tolist()
            is_over = bool(output.finished)
        return Decoded(
            token_ids=token_ids,
            num_steps=num_steps,
            total_s=total_s,
            part_s=self._step_clock.seconds(),
            drafted=drafted,
            accepted=accepted,
        )

    def _step(self, redraft: Redraft) -> tuple[StepPlan, StepResult, StepOutput]:
        """Plan, compute and commit one step; plan and result as they arrive over the wire."""
        planned = self._central.plan(INSTANCE_ID)
        assert planned is not None, "a request alone can always go on"
        plan = plan_from_bytes(pack(planned))
        result = self._worker.execute(plan)
        assert result is not None, "the one rank samples"
        result = redraft(plan, result_from_bytes(pack(result)))
        return plan, result, self._central.commit(INSTANCE_ID, result)
