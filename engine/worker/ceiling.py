"""How fast the model's linear layers alone would be: the bound that a benchmark holds throughput against.

Owns nothing. Runs on the thread that calls it, with whatever threads torch has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.layers import Linear


@torch.inference_mode()
def linear_ceiling(model: Decoder, *, num_rows: int, repeats: int, num_logit_rows: int | None = None) -> float:
    """Median seconds of one pass of num_rows tokens through all linear layers, on this rank.

    num_logit_rows tokens (default all) pass the head: num_rows in decode, the number of sequences in prefill.
    """
    if num_rows < 1 or repeats < 1:
        raise ValueError(f"num_rows={num_rows} and repeats={repeats} must be at least 1")
    work = [_with_input(linear, num_rows) for linear in model.layer_linears]
    if model.head is not None:
        work.append(_with_input(model.head, num_rows if num_logit_rows is None else num_logit_rows))
    times = list(_timed(work, repeats + 1))
    return statistics.median(times[1:])


def _with_input(linear: Linear, num_rows: int) -> tuple[Linear, torch.Tensor]:
    return linear, torch.full((num_rows, linear.in_features), 0.1, dtype=linear.dtype, device=linear.device)


def _timed(work: list[tuple[Linear, torch.Tensor]], repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        started_s = time.perf_counter()
        for linear, x_TE in work:
            y_TF = linear(x_TE)
        if y_TF.device.type == "cuda":
            torch.cuda.synchronize(y_TF.device)
        yield time.perf_counter() - started_s
