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
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.models.state_ops import StateMetadata
from blockferry.engine.models.step import LayerStates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """One cache group's view of one step; one of the two, by what the group stores."""

    attention: AttentionMetadata | None = None
    states: StateMetadata | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """One layer's pages: the group whose blocks they are, and a view [B, ...] of each of its tensors."""

    group: int
    tensors: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePages:
    """Pages of a stage's layers by layer number, of those that attend and of those that keep a state."""

    attention: Mapping[int, LayerPages]
    states: Mapping[int, LayerPages]

    @classmethod
    def of(cls, plan: KVCachePlan, model: ModelLayers, views: Mapping[int, tuple[torch.Tensor, ...]]) -> StagePages:
        """From a plan, whose layer ids count the caches of `model`, and its views per layer id."""
        attention: dict[int, LayerPages] = {}
        states: dict[int, LayerPages] = {}
        for region in plan.regions:
            for layer_id in region.layer_ids:
                pages = LayerPages(group=region.group, tensors=views[layer_id])
                is_attention = isinstance(model.layers[layer_id], AttentionSpec)
                (attention if is_attention else states)[model.layer_numbers[layer_id]] = pages
        return cls(attention=attention, states=states)


class PagedCaches:
    """See models.step.Caches. The worker's model thread calls it."""

    def __init__(self, pages: StagePages, attention: AttentionBackend, latent: LatentBackend) -> None:
        self.pages = pages
        self._attention = attention
        self._latent = latent
        self._metadata: Sequence[GroupMetadata] = ()

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
        return self._attention.forward(q_THD, k_TKD, v_TKD, kv_cache=pages.tensors[0], metadata=metadata, rule=rule)

    def attend_latent(
        self, layer: int, q_THR: torch.Tensor, latent_TR: torch.Tensor, rule: AttentionRule, *, value_dim: int
    ) -> torch.Tensor:
        """See Caches."""
        pages = self.pages.attention[layer]
        metadata = self._metadata[pages.group].attention
        assert metadata is not None, (layer, pages.group)
        return self._latent.forward(
            q_THR, latent_TR, kv_cache=pages.tensors[0], metadata=metadata, rule=rule, value_dim=value_dim
        )

    def states(self, layer: int) -> LayerStates:
        """See Caches."""
        pages = self.pages.states[layer]
        metadata = self._metadata[pages.group].states
        assert metadata is not None, (layer, pages.group)
        return LayerStates(tensors=pages.tensors, metadata=metadata)
