"""Reads the modules that draft for a model (mtp.py), from its own checkpoint or from a head folder.

    DeepSeek-V3, heads: model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm} beside the layer's own tensors, N from
                        the number of the model's layers on
    Qwen3-Next, 3.5:    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, shared by layers mtp.layers.0..

Embedding and head are the model's; where a module brings copies of them (embed_tokens, shared_head.head), those are not
read. A head folder may hold draft_token_ids, the shortlist of what it drafts.

Legend: E hidden, V this rank's vocabulary rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from blockferry.engine.models.config import DENSE_ARCHITECTURES
from blockferry.engine.models.decoder import Build, Decoder, Layer, read_vocab
from blockferry.engine.models.deepseek import deepseek_layers
from blockferry.engine.models.draft_vocabulary import DraftVocabulary, check_shortlist
from blockferry.engine.models.layers import Linear, VocabEmbedding, make_linear
from blockferry.engine.models.llama import llama_draft_layers
from blockferry.engine.models.mtp import Drafter, DraftLayer, MtpModule, SharedParts
from blockferry.engine.models.qwen3_next import qwen3_next_draft_layers

SHORTLIST = "draft_token_ids"
_TILE_ROWS = 32  # of kernels.cpu_linear, which takes no other heights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """Tensors of a module beside its layer's; {} stands for the layer's number."""

    embedding_norm: str = "model.layers.{}.enorm.weight"
    hidden_norm: str = "model.layers.{}.hnorm.weight"
    projection: str = "model.layers.{}.eh_proj"
    last_norm: str = "model.layers.{}.shared_head.norm.weight"


ReadLayers = Callable[[Build, Sequence[int]], Sequence[DraftLayer]]


def _untaped(read: Callable[[Build, Sequence[int]], Sequence[Layer]]) -> ReadLayers:
    """Layers that no tape can be recorded from."""
    return lambda build, numbers: [DraftLayer(layer=layer) for layer in read(build, numbers)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftFamily:
    """How one family's modules are read, and what they hand on."""

    layers: ReadLayers
    names: ModuleNames = ModuleNames()
    norm_offset: float = 0.0
    hands_on_normed: bool


_LLAMA = DraftFamily(layers=llama_draft_layers, hands_on_normed=False)
_QWEN3_NEXT = DraftFamily(
    layers=_untaped(qwen3_next_draft_layers),
    names=ModuleNames(
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc",
        last_norm="mtp.norm.weight",
    ),
    norm_offset=1.0,
    hands_on_normed=True,
)
DRAFT_FAMILIES: Mapping[str, DraftFamily] = {
    **dict.fromkeys(DENSE_ARCHITECTURES, _LLAMA),
    "DeepseekV3ForCausalLM": DraftFamily(layers=_untaped(deepseek_layers), hands_on_normed=True),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
}


def build_drafter(model: Decoder, base: Build, modules: Build, numbers: Sequence[int]) -> Drafter:
    """The drafter of a rank of the last stage. Raises ModelLoadError or ConfigError.

    Args:
        model: what this rank holds of the model.
        base: where the model came from.
        modules: the same, where the modules come from: with the head folder's tensors, or the model's.
        numbers: of the modules' layers, one module each; modules.reaches has them.
    """
    family = DRAFT_FAMILIES[base.header.architecture]
    shared = SharedParts(
        embed=_embedding(model, base),
        normed=model.normed,
        vocabulary=_vocabulary(model, base, modules),
        ops=base.ops,
        norm_eps=base.header.norm_eps,
    )
    layers = family.layers(modules, numbers)
    read = [_read_module(modules, family, number, layer) for number, layer in zip(numbers, layers, strict=True)]
    return Drafter(read, shared, hands_on_normed=family.hands_on_normed)


def _read_module(build: Build, family: DraftFamily, number: int, draft_layer: DraftLayer) -> MtpModule:
    names, weights, hidden_size = family.names, build.weights, build.header.hidden_size

    def norm(name: str) -> torch.Tensor:
        return weights.norm(name.format(number), hidden_size, offset=family.norm_offset)

    return MtpModule(
        number=number,
        embedding_norm_E=norm(names.embedding_norm),
        hidden_norm_E=norm(names.hidden_norm),
        projection=weights.linear(names.projection.format(number), (hidden_size, 2 * hidden_size)),
        draft_layer=draft_layer,
        last_norm_E=norm(names.last_norm),
    )


def _embedding(model: Decoder, base: Build) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's, read once more where an earlier stage holds it."""
    if base.shard.is_first_stage:
        return model.embed
    return VocabEmbedding(read_vocab(base, model.ends.embedding_name), base.shard.vocab, base.communicator)


def _vocabulary(model: Decoder, base: Build, modules: Build) -> DraftVocabulary:
    span, device = base.shard.vocab, base.weights.placement.device
    checkpoint = modules.weights.checkpoint
    if SHORTLIST not in checkpoint:
        assert model.head is not None, "drafters are of the last stage"
        token_ids_V = torch.arange(span.start, span.stop, device=device)
        return DraftVocabulary(model.head, token_ids_V, base.communicator)
    shortlist = checkpoint.tensor(SHORTLIST)
    check_shortlist(shortlist, base.header.vocab_size, name=f"{checkpoint.path}: {SHORTLIST}")
    token_ids_V = shortlist[(shortlist >= span.start) & (shortlist < span.stop)].long().to(device)
    return DraftVocabulary(_rows_of_head(model, base, token_ids_V - span.start), token_ids_V, base.communicator)


def _rows_of_head(model: Decoder, base: Build, rows_V: torch.Tensor) -> Linear:
    """Those rows of this rank's part of the head, in memory of their own, and padding to whole tiles of its kernels."""
    head_VE = read_vocab(base, model.ends.head_name_of(base.header))
    num_padding = -len(rows_V) % _TILE_ROWS if len(rows_V) else 1
    rows_V = torch.cat((rows_V, torch.zeros(num_padding, dtype=torch.int64, device=rows_V.device)))
    return make_linear(head_VE.index_select(0, rows_V))
