"""A stage's caches behind one pool: which layer's pages lie where, and which kernels read them.

Implements models.step.Caches. Owns the views of a rank's pages and the metadata of the step under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule, LatentBackend
from blockferry.engine.kv.model_layers import ModelLayers
from blockferry.engine.kv.plan import KVCachePlan
from blockferry.engine.kv.reach import EncoderReach
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.models.state_ops import StateMetadata
from blockferry.engine.models.step import LayerStates
from blockferry.kernels.fp8 import CacheScales

_NO_SCALES: Mapping[int, CacheScales] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """One cache group's view of one step; one of the two, by what the group stores.

    A group of cross attention stores an encoder's input: each token of the step is a row that writes nothing there.
    """

    attention: AttentionMetadata | None = None
    states: StateMetadata | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """One layer's pages: the group whose blocks they are, and a view [B, ...] of each of its tensors."""

    group: int
    tensors: tuple[torch.Tensor, ...]
    scales: CacheScales | None = None  # of pages in fp8

    def rule(self, rule: AttentionRule) -> AttentionRule:
        """The layer's rule as backends need it for these pages."""
        return rule if self.scales is None else dataclasses.replace(rule, scales=self.scales)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePages:
    """Pages of a stage's layers by layer number: of those that attend, keep a state, attend to an encoder's input."""

    attention: Mapping[int, LayerPages]
    states: Mapping[int, LayerPages]
    cross: Mapping[int, LayerPages] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: KVCachePlan,
        model: ModelLayers,
        views: Mapping[int, tuple[torch.Tensor, ...]],
        scales: Mapping[int, CacheScales] = _NO_SCALES,
    ) -> StagePages:
        """From a plan, whose layer ids count the caches of `model`, and its views and scales per layer id."""
        attention: dict[int, LayerPages] = {}
        states: dict[int, LayerPages] = {}
        cross: dict[int, LayerPages] = {}
        for region in plan.regions:
            for layer_id in region.layer_ids:
                pages = LayerPages(group=region.group, tensors=views[layer_id], scales=scales.get(layer_id))
                match model.layers[layer_id]:
                    case AttentionSpec(reach=EncoderReach()):
                        kind = cross
                    case AttentionSpec():
                        kind = attention
                    case _:
                        kind = states
                kind[model.layer_numbers[layer_id]] = pages
        return cls(attention=attention, states=states, cross=cross)


class PagedCaches:
    """See models.step.Caches. The worker's model thread calls it."""

    def __init__(self, pages: StagePages, attention: AttentionBackend, latent: LatentBackend) -> None:
        self.pages = pages
        self._attention = attention
        self._latent = latent
        self._metadata: Sequence[GroupMetadata] = ()
        self._cross_slots_N: Sequence[torch.Tensor | None] = ()

    def begin_encoding(self, slots_N: Sequence[torch.Tensor | None]) -> None:
        """One row's encoder input is about to be encoded; slots [N] (int64) per cache group, None: not of it."""
        self._cross_slots_N = slots_N

    def begin(self, metadata: Sequence[GroupMetadata]) -> None:
        """A step begins; one entry per cache group."""
        self._metadata = metadata

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """See Caches."""
        pages = self.pages.attention[layer]
        metadata = self._metadata[pages.group].attention
        assert metadata is not None, (layer, pages.group)
        return self._attention.forward(
            q_THD, k_TKD, v_TKD, kv_cache=pages.tensors[0], metadata=metadata, rule=pages.rule(rule)
        )

    def attend_latent(
        self, layer: int, q_THR: torch.Tensor, latent_TR: torch.Tensor, rule: AttentionRule, *, value_dim: int
    ) -> torch.Tensor:
        """See Caches."""
        pages = self.pages.attention[layer]
        metadata = self._metadata[pages.group].attention
        assert metadata is not None, (layer, pages.group)
        return self._latent.forward(
            q_THR, latent_TR, kv_cache=pages.tensors[0], metadata=metadata, rule=pages.rule(rule), value_dim=value_dim
        )

    def write_cross(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """See Caches."""
        pages = self.pages.cross[layer]
        slots_N, kv_cache = self._cross_slots_N[pages.group], pages.tensors[0]
        assert slots_N is not None, (layer, pages.group)
        block_size = kv_cache.shape[2]
        kv_NKC = torch.cat((k_NKD, v_NKD), dim=-1).to(kv_cache.dtype)
        kv_cache[slots_N // block_size, :, slots_N % block_size] = kv_NKC

    def attend_cross(self, layer: int, q_THD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """See Caches."""
        pages = self.pages.cross[layer]
        metadata, kv_cache = self._metadata[pages.group].attention, pages.tensors[0]
        assert metadata is not None, (layer, pages.group)
        unwritten_TKD = q_THD[:, : kv_cache.shape[1]]  # of the right shape: no slot asks for it
        return self._attention.forward(
            q_THD, unwritten_TKD, unwritten_TKD, kv_cache=kv_cache, metadata=metadata, rule=rule
        )

    def states(self, layer: int) -> LayerStates:
        """See Caches."""
        pages = self.pages.states[layer]
        metadata = self._metadata[pages.group].states
        assert metadata is not None, (layer, pages.group)
        return LayerStates(tensors=pages.tensors, metadata=metadata)
