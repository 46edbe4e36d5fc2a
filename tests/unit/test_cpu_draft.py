"""A taped pass of a module that drafts computes bit for bit what it computes layer by layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import make_checkpoint
from support.paged import make_metadata, make_table

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.config import Device, DraftMethod, SpeculationConfig
from blockferry.engine.models.cpu_draft import TapedModule, can_tape_module
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.models.registry import ModelParts, load_drafter, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.backends import draft_compute
from blockferry.engine.worker.draft_compute import LayeredDrafts, TapedDrafts
from blockferry.engine.worker.paged_caches import GroupMetadata, LayerPages, PagedCaches, StagePages
from blockferry.engine.worker.parallel import LoneCommunicator
from blockferry.kernels.cpu_amx import has_amx

pytestmark = pytest.mark.skipif(not has_amx(), reason="needs AMX")

HIDDEN, FEATURES, HEADS, KV_HEADS, HEAD_DIM, VOCAB, NUM_LAYERS = 96, 64, 6, 2, 64, 128, 3
NUM_BLOCKS = 100
SHORTLIST = list(range(3, 73))


def make_head(folder: Path) -> Path:
    """Random, with a shortlist that is no multiple of a tile."""
    generator, prefix = torch.Generator().manual_seed(3), f"model.layers.{NUM_LAYERS}."
    shapes = {
        **{f"{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm")},
        "post_attention_layernorm.weight": (HIDDEN,),
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (FEATURES, HIDDEN),
        "mlp.up_proj.weight": (FEATURES, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FEATURES),
    }
    tensors = {prefix + name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors | {"draft_token_ids": torch.tensor(SHORTLIST, dtype=torch.int32)}, folder / "model.safetensors")
    config = {"model_type": "llama_mtp", "num_nextn_predict_layers": 1, "hidden_size": HIDDEN}
    config |= {"base_num_hidden_layers": NUM_LAYERS, "base_vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Drafter:
    path = make_checkpoint(
        folder / "model",
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=FEATURES,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        num_hidden_layers=NUM_LAYERS,
    )
    placement = Placement(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=128)
    parts = ModelParts(ops=CpuOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator())
    model = load_model(path, RankPlace(), placement=placement, parts=parts)
    speculation = SpeculationConfig(method=DraftMethod.MTP, head_path=make_head(folder / "head"))
    drafter = load_drafter(model, path, speculation=speculation, place=RankPlace(), placement=placement, parts=parts)
    assert drafter is not None
    return drafter


def caches_of(pages: torch.Tensor) -> PagedCaches:
    stage = StagePages(attention={NUM_LAYERS: LayerPages(group=0, tensors=(pages,))}, states={})
    return PagedCaches(stage, CpuAttention(), TorchLatentAttention())


def rows_of_two_sequences(query_lens: list[int], ends: list[int]) -> tuple[AttentionMetadata, torch.Tensor]:
    """Tokens as rows of their own: the last ones of each sequence. With their positions."""
    tables = make_table(ends, num_blocks=NUM_BLOCKS)
    seq_lens = [end - left for count, end in zip(query_lens, ends) for left in range(count - 1, -1, -1)]
    table = tables.repeat_interleave(torch.tensor(query_lens), dim=0)
    return make_metadata([1] * len(seq_lens), seq_lens, table), torch.tensor(seq_lens) - 1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_taped_passes_equal_the_module_layer_by_layer(tmp_path: Path, num_threads: int) -> None:
    drafter = load(tmp_path)
    torch.manual_seed(1)
    pages = torch.randn(NUM_BLOCKS, KV_HEADS, 16, 2 * HEAD_DIM).bfloat16()
    other_pages = pages.clone()
    taped = draft_compute(Device.CPU, drafter, caches_of(pages))
    layered = LayeredDrafts(drafter, caches_of(other_pages))
    assert isinstance(taped, TapedDrafts)
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            metadata, positions = rows_of_two_sequences([3, 1], [34, 17])
            ids, hidden = torch.tensor([5, 9, 40, 77]), torch.randn(4, HIDDEN).bfloat16()
            other_hidden = hidden
            for _ in range(3):  # the module goes on from its own output
                groups = [GroupMetadata(attention=metadata)]
                mine = taped.forward(0, ids, hidden, positions_T=positions, metadata=groups)
                other = layered.forward(0, ids, other_hidden, positions_T=positions, metadata=groups)
                assert torch.equal(mine.normed_TE, other.normed_TE)
                assert torch.equal(mine.handed_on_TE, other.handed_on_TE)
                assert torch.equal(pages, other_pages)
                ids, hidden, other_hidden = (
                    drafter.best_tokens(mine.normed_TE).token_ids_S,
                    mine.handed_on_TE,
                    other.handed_on_TE,
                )
    finally:
        torch.set_num_threads(previous)


def test_drafts_are_the_best_of_the_shortlist_and_no_padding(tmp_path: Path) -> None:
    drafter = load(tmp_path)
    normed = torch.randn(50, HIDDEN).bfloat16()
    with torch.inference_mode():
        found = drafter.best_tokens(normed).token_ids_S
    assert set(found.tolist()) <= set(SHORTLIST)
    assert len(set(found.tolist())) > 10


def test_chunks_are_computed_layer_by_layer_and_other_dtypes_are_not_taped(tmp_path: Path) -> None:
    drafter = load(tmp_path)
    pages = torch.zeros(NUM_BLOCKS, KV_HEADS, 16, 2 * HEAD_DIM).bfloat16()
    taped = TapedModule(drafter, 0, pages)
    assert not taped.accepts(make_metadata([4], [20], make_table([20], num_blocks=NUM_BLOCKS)))
    assert not can_tape_module(drafter.modules[0], pages.float())
    with pytest.raises(ValueError, match="cannot be taped"):
        TapedModule(drafter, 0, pages.float())
    assert isinstance(draft_compute(Device.CPU, drafter, caches_of(pages.float())), LayeredDrafts)
