"""The ranks of one instance: tensor-parallel collectives, the pipeline's links, sharing of sampled tokens.

Owns this process's torch.distributed state (gloo on CPU, nccl on GPU). Every rank makes the same calls in the
same order; every wait ends after WorkerSpec.collective_timeout_s.

    rank = pp_rank * tp_size + tp_rank        stage 0: ranks 0..tp-1, stage 1: tp..2 tp-1, ...
    hidden states go rank -> rank + tp_size   sampled tokens go from sampler_rank to all
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from blockferry.engine.config import Device
from blockferry.engine.errors import RankLost
from blockferry.engine.models.layers import Communicator
from blockferry.engine.request import Int32Array
from blockferry.engine.worker.spec import WorkerSpec


class Parallel(Protocol):
    """This rank's links to the other ranks of its instance."""

    tensor: Communicator

    def send_hidden(self, x_TE: torch.Tensor) -> None:
        """Pass hidden states to the next stage."""

    def receive_hidden(self, out_TE: torch.Tensor) -> torch.Tensor:
        """Fill `out_TE` with the previous stage's hidden states and return it."""

    def share_tokens(self, token_ids: Int32Array) -> Int32Array:
        """The sampler rank's token ids on every rank; other ranks pass an array of that length."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class LoneCommunicator:
    """The only rank of its stage."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Communicator."""
        return x

    def gather_columns(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """See Communicator."""
        return x_SV


class LoneRank:
    """An instance of one worker: no process group at all."""

    def __init__(self) -> None:
        self.tensor: Communicator = LoneCommunicator()

    def send_hidden(self, x_TE: torch.Tensor) -> None:
        """See Parallel."""
        raise AssertionError(f"a lone rank has no next stage to send {tuple(x_TE.shape)} to")

    def receive_hidden(self, out_TE: torch.Tensor) -> torch.Tensor:
        """See Parallel."""
        raise AssertionError(f"a lone rank has no previous stage to send {tuple(out_TE.shape)}")

    def share_tokens(self, token_ids: Int32Array) -> Int32Array:
        """See Parallel."""
        return token_ids

    def close(self) -> None:
        """See Parallel."""


class GroupCommunicator:
    """Ranks of one stage over a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """`rank` counts within the stage."""
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Communicator."""
        _await(self.rank, "sum over its stage", lambda: dist.all_reduce(x, group=self._group))
        return x

    def gather_columns(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """See Communicator."""
        x_SV = x_SV.contiguous()
        parts = None if self.rank else [torch.empty_like(x_SV) for _ in range(self.size)]
        _await(self.rank, "gather logits", lambda: dist.gather(x_SV, parts, group=self._group, group_dst=0))
        return None if parts is None else torch.cat(parts, dim=-1)


class RankGroup:
    """An instance of several workers."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Meet the other ranks at spec.init_method. Raises ValueError without one, RankLost on timeout."""
        if not spec.init_method:
            raise ValueError(f"{spec.world_size} ranks need a meeting point; set init_method to tcp://host:port")
        timeout = datetime.timedelta(seconds=spec.collective_timeout_s)
        start = functools.partial(
            dist.init_process_group,
            "gloo" if spec.device is Device.CPU else "nccl",
            init_method=spec.init_method,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timeout,
        )
        _await(spec.rank, f"meet the other {spec.world_size - 1} ranks at {spec.init_method}", start)
        self._spec = spec
        self._device = torch.device("cpu" if spec.device is Device.CPU else f"cuda:{spec.device_index}")
        self.tensor: Communicator = LoneCommunicator()
        for stage in range(spec.pp_size if spec.tp_size > 1 else 0):  # every rank takes part in making every group
            ranks = list(range(stage * spec.tp_size, (stage + 1) * spec.tp_size))
            group = dist.new_group(ranks, timeout=timeout)
            if stage == spec.pp_rank:
                self.tensor = GroupCommunicator(group, spec.tp_rank, spec.tp_size)

    def send_hidden(self, x_TE: torch.Tensor) -> None:
        """See Parallel."""
        peer = self._spec.rank + self._spec.tp_size
        _await(self._spec.rank, f"send to rank {peer}", lambda: dist.send(x_TE.contiguous(), peer))

    def receive_hidden(self, out_TE: torch.Tensor) -> torch.Tensor:
        """See Parallel."""
        peer = self._spec.rank - self._spec.tp_size
        _await(self._spec.rank, f"receive from rank {peer}", lambda: dist.recv(out_TE, peer))
        return out_TE

    def share_tokens(self, token_ids: Int32Array) -> Int32Array:
        """See Parallel."""
        tokens = torch.from_numpy(token_ids).to(self._device)
        _await(self._spec.rank, "share tokens", lambda: dist.broadcast(tokens, self._spec.sampler_rank))
        return np.asarray(tokens.cpu().numpy())

    def close(self) -> None:
        """See Parallel."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _await(rank: int, phase: str, communicate: Callable[[], object]) -> None:
    try:
        communicate()
    except RuntimeError as error:  # a peer that died, or the timeout
        raise RankLost(rank, phase, str(error).partition("\n")[0]) from error


def join(spec: WorkerSpec) -> Parallel:
    """Connect this rank to its instance; blocks until every rank is there."""
    return LoneRank() if spec.world_size == 1 else RankGroup(spec)
