"""Trains a draft module on examples: AdamW, warm-up and cosine, resumed after a kill as if there had been none.

    WORK/training.pt     weights, optimiser state and the number of steps done

Which windows a step takes is a function of (seed, step), so an interrupted training repeats no draw and skips none.
"""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from blockferry.engine.spec_decode.training.examples import Batch, Examples, shuffled
from blockferry.engine.spec_decode.training.files import write_bytes
from blockferry.engine.spec_decode.training.loss import draft_loss
from blockferry.engine.spec_decode.training.module import DraftModule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a module is trained. The defaults suit a head of a few million weights and some 10^5 tokens."""

    num_epochs: int = 8
    num_steps: int = 3  # unrolled in the last third of the training, two in the second, one in the first, at less cost
    step_decay: float = 0.7  # each unrolled step is weighed so much less than the one before
    tokens_per_batch: int = 2048
    learning_rate: float = 1.5e-4  # at 6e-4 the loss rises at first and falls again as the rate does
    weight_decay: float = 0.05
    warm_up_part: float = 0.04
    last_rate_part: float = 0.02
    max_grad_norm: float = 1.0
    seed: int = 0
    save_every_s: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that was done."""

    number: int
    num_steps: int
    loss: float  # per unit of weight, first unrolled step
    learning_rate: float


class Trainer:
    """Owns the module's weights while it trains. One thread calls it."""

    def __init__(
        self, module: DraftModule, embedding_VE: torch.Tensor, head_VE: torch.Tensor, settings: TrainSettings
    ) -> None:
        """head_VE: of the drafted vocabulary; neither learns."""
        self.module = module
        self._embedding_VE = embedding_VE
        self._head_VE = head_VE
        self._settings = settings
        matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
        self.num_done = 0
        self.elapsed_s = 0.0

    def run(self, examples: Examples, path: Path, *, limit_s: float, tick: Callable[[Step], None]) -> None:
        """Train to the end or, decaying faster, until limit_s seconds are spent. Goes on from `path`, if it exists."""
        if path.exists():
            self._restore(torch.load(path, weights_only=True))
        settings = self._settings
        epochs = [
            shuffled(examples.windows, tokens_per_batch=settings.tokens_per_batch, seed=settings.seed + epoch)
            for epoch in range(settings.num_epochs)
        ]
        batches = [batch for epoch in epochs for batch in epoch]
        saved_s = time.monotonic()
        for number in range(self.num_done, len(batches)):
            started_s = time.monotonic()
            part = max(number / len(batches), self.elapsed_s / limit_s)
            if part >= 1.0:
                break
            batch = examples.batch(batches[number], num_steps=1 + int(part * settings.num_steps))
            loss = self._step(batch, rate=self._rate(part))
            self.num_done = number + 1
            self.elapsed_s += time.monotonic() - started_s
            tick(Step(number=self.num_done, num_steps=len(batches), loss=loss, learning_rate=self._rate(part)))
            if time.monotonic() - saved_s > settings.save_every_s:
                self.save(path)
                saved_s = time.monotonic()
        self.save(path)

    def save(self, path: Path) -> None:
        """Write everything that run() goes on from."""
        buffer = io.BytesIO()
        state = {"module": self.module.state_dict(), "optimiser": self._optimiser.state_dict()}
        torch.save({**state, "num_done": self.num_done, "elapsed_s": self.elapsed_s}, buffer)
        write_bytes(path, buffer.getvalue())

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.num_done, self.elapsed_s = state["num_done"], state["elapsed_s"]

    def _step(self, batch: Batch, *, rate: float) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        weights = [self._settings.step_decay**step for step in range(len(batch.token_ids_SBT))]
        losses = step_losses(self.module, self._embedding_VE, self._head_VE, batch)
        loss = sum((weight * one for weight, one in zip(weights, losses, strict=True)), torch.zeros(())) / sum(weights)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.max_grad_norm)
        self._optimiser.step()
        return float(losses[0].detach())

    def _rate(self, part: float) -> float:
        settings = self._settings
        if part < settings.warm_up_part:
            return settings.learning_rate * max(part / settings.warm_up_part, 0.01)
        turn = (part - settings.warm_up_part) / (1.0 - settings.warm_up_part)
        cosine = 0.5 * (1.0 + math.cos(math.pi * turn))
        return settings.learning_rate * (settings.last_rate_part + (1.0 - settings.last_rate_part) * cosine)


def step_losses(
    module: DraftModule, embedding_VE: torch.Tensor, head_VE: torch.Tensor, batch: Batch
) -> list[torch.Tensor]:
    """The loss of every unrolled step, per unit of its targets' weight."""
    outputs_SBTE = module(embedding_VE[batch.token_ids_SBT], batch.hidden_BTE, batch.first_B)
    losses = []
    for outputs_BTE, ids_BTK, probs_BTK in zip(outputs_SBTE, batch.ids_SBTK, batch.probs_SBTK, strict=True):
        counts_BT = probs_BTK.sum(-1) > 0
        if not counts_BT.any():
            losses.append(torch.zeros(()))
            continue
        probs_NK = probs_BTK[counts_BT]
        loss = draft_loss(outputs_BTE[counts_BT], head_VE, ids_BTK[counts_BT], probs_NK)
        losses.append(loss / probs_NK.sum())
    return losses
