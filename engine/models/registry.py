"""Which family computes which architecture. Owns nothing; the one place a new family is added.

config.py says what a checkpoint is without torch; this module builds the model it describes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from blockferry.engine.config import SpeculationConfig
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_layers import LayerOptions, layers_of
from blockferry.engine.kv.reach import EncoderReach, FullReach, Reach
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.models.bamba import build_bamba
from blockferry.engine.models.bart import build_bart
from blockferry.engine.models.config import ModelHeader, load_error, read_header
from blockferry.engine.models.decoder import Build, Decoder, stage_shard
from blockferry.engine.models.deepseek import build_deepseek_v3
from blockferry.engine.models.draft_head import num_drafting_layers
from blockferry.engine.models.falcon_h1 import build_falcon_h1
from blockferry.engine.models.gemma import build_gemma
from blockferry.engine.models.gpt_oss import build_gpt_oss
from blockferry.engine.models.jamba import build_jamba
from blockferry.engine.models.layers import Communicator
from blockferry.engine.models.lfm2 import build_lfm2
from blockferry.engine.models.llama import build_llama
from blockferry.engine.models.llama4 import build_llama4
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.models.mtp_loader import build_drafter
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.qwen3_moe import build_qwen3_moe
from blockferry.engine.models.qwen3_next import build_qwen3_5, build_qwen3_next
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.state_ops import StateOps
from blockferry.engine.models.weights import Placement, WeightReader

FAMILIES: Mapping[str, Callable[[Build], Decoder]] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_llama,
    "Gemma2ForCausalLM": build_gemma,
    "Gemma3ForCausalLM": build_gemma,
    "Llama4ForCausalLM": build_llama4,
    "Lfm2ForCausalLM": build_lfm2,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
    "DeepseekV3ForCausalLM": build_deepseek_v3,
    "GptOssForCausalLM": build_gpt_oss,
    "JambaForCausalLM": build_jamba,
    "BambaForCausalLM": build_bamba,
    "FalconH1ForCausalLM": build_falcon_h1,
    "Qwen3NextForCausalLM": build_qwen3_next,
    "Qwen3_5ForCausalLM": build_qwen3_5,
    "Qwen3_5MoeForCausalLM": build_qwen3_5,
    "BartForConditionalGeneration": build_bart,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """A device's kernels and a rank's peers, which every family is given."""

    ops: LayerOps
    state_ops: StateOps
    communicator: Communicator


def load_model(path: Path, place: RankPlace, *, placement: Placement, parts: ModelParts) -> Decoder:
    """Read one rank's part of the checkpoint at `path`. Raises ModelLoadError in one line."""
    with _opened(path, place, placement, parts) as build:
        return FAMILIES[build.header.architecture](build)


def load_drafter(
    model: Decoder,
    path: Path,
    *,
    speculation: SpeculationConfig | None,
    place: RankPlace,
    placement: Placement,
    parts: ModelParts,
) -> Drafter | None:
    """Read the modules that draft for a model loaded from `path`. Raises ModelLoadError in one line.

    None where this rank computes none: before the last stage, for n-grams, without speculation.
    """
    count = num_drafting_layers(model.header, speculation)
    if speculation is None or not count or not model.shard.is_last_stage:
        return None
    first = model.header.num_layers
    numbers = range(first, first + count)
    with (
        _opened(path, place, placement, parts) as base,
        contextlib.closing(Checkpoint(speculation.head_path or path)) as checkpoint,
    ):
        modules = dataclasses.replace(
            base,
            weights=WeightReader(checkpoint, placement, adds_row_bias=parts.communicator.rank == 0),
            reaches=dict.fromkeys(numbers, FullReach()),
        )
        return build_drafter(model, base, modules, numbers)


@contextlib.contextmanager
def _opened(path: Path, place: RankPlace, placement: Placement, parts: ModelParts) -> Iterator[Build]:
    """Everything to build from, the checkpoint open; a ConfigError inside is said to be of it."""
    header = read_header(path)
    header.check_length(placement.max_model_len)
    try:  # nothing wider: a mistake of ours is not the checkpoint's
        shard, reaches = stage_shard(header, place), _reaches(header, place)
        with contextlib.closing(Checkpoint(path)) as checkpoint:
            yield Build(
                header=header,
                config=ModelConfig(header.values),
                place=place,
                shard=shard,
                weights=WeightReader(checkpoint, placement, adds_row_bias=parts.communicator.rank == 0),
                ops=parts.ops,
                state_ops=parts.state_ops,
                communicator=parts.communicator,
                reaches=reaches,
            )
    except ConfigError as error:
        raise load_error(path, error) from error


def _reaches(header: ModelHeader, place: RankPlace) -> dict[int, Reach]:
    """What each layer that attends to its own sequence sees."""
    model = layers_of(header.values, LayerOptions(tp_size=place.tp_size))
    return {
        number: spec.reach
        for number, spec in zip(model.layer_numbers, model.layers, strict=True)
        if isinstance(spec, AttentionSpec) and not isinstance(spec.reach, EncoderReach)
    }
