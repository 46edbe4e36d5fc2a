"""A taped decode step computes bit for bit what the layers compute one by one."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.paged import make_metadata, make_table
from support.worker_driver import generate, start_worker, worker_spec

from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.config import DType
from blockferry.engine.models.cpu_decode import TapedDecode, can_tape
from blockferry.engine.models.cpu_layer_tape import MAX_ROWS
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.model_runner import LayerByLayer
from blockferry.engine.worker.paged_caches import GroupMetadata, LayerPages, PagedCaches, StagePages
from blockferry.engine.worker.parallel import LoneCommunicator
from blockferry.kernels.cpu_amx import has_amx

pytestmark = pytest.mark.skipif(not has_amx(), reason="needs AMX")

SHAPE = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
NUM_BLOCKS = 300
PARTS = ModelParts(ops=CpuOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator())


class Setup:
    """One tiny bfloat16 model over one pool, both ways."""

    def __init__(self, folder: Path, family: str) -> None:
        path = make_checkpoint(folder, family, **SHAPE)
        placement = Placement(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=128)
        self.model = load_model(path, RankPlace(), placement=placement, parts=PARTS)
        torch.manual_seed(1)
        self.pool = torch.randn(3, NUM_BLOCKS, 2, 16, 128).bfloat16()
        self.taped = TapedDecode(self.model, self.pool.unbind())

    def run_both(self, seq_lens: list[int]) -> None:
        table = make_table(seq_lens, num_blocks=NUM_BLOCKS)
        metadata = make_metadata([1] * len(seq_lens), seq_lens, table)
        x, positions = torch.randn(len(seq_lens), 96).bfloat16(), torch.tensor(seq_lens) - 1
        other_pool = self.pool.clone()
        pages = {layer: LayerPages(group=0, tensors=(one,)) for layer, one in enumerate(other_pool.unbind())}
        caches = PagedCaches(StagePages(attention=pages, states={}), CpuAttention(), TorchLatentAttention())
        by_layer = LayerByLayer(self.model, caches)
        assert self.taped.accepts(metadata)
        expected = by_layer.forward(x.clone(), positions, [GroupMetadata(attention=metadata)])
        assert torch.equal(self.taped.forward(x, positions, metadata), expected)
        assert torch.equal(self.pool, other_pool)


@pytest.mark.parametrize("family", ["llama", "llama_biased", "qwen3"])
def test_taped_step_equals_layer_by_layer(tmp_path: Path, family: str) -> None:
    setup = Setup(tmp_path, family)
    with torch.inference_mode():
        for seq_lens in ([1], [17, 64, 128], [1 + 7 * row % 60 for row in range(33)], [20] * MAX_ROWS, [5]):
            setup.run_both(seq_lens)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_tokens_of_one_sequence_in_one_step_equal_a_step_for_each(tmp_path: Path, num_threads: int) -> None:
    setup = Setup(tmp_path, "llama")
    starts, num_tokens = [14, 70], 4  # one crosses a block's border
    tables = make_table([start + num_tokens for start in starts], num_blocks=NUM_BLOCKS)
    seq_lens = [start + token + 1 for start in starts for token in range(num_tokens)]
    metadata = make_metadata([1] * len(seq_lens), seq_lens, tables.repeat_interleave(num_tokens, dim=0))
    x, positions = torch.randn(len(seq_lens), 96).bfloat16(), torch.tensor(seq_lens) - 1
    previous, before = torch.get_num_threads(), setup.pool.clone()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            expected = []
            for token, seq_len in enumerate(seq_lens):
                step = make_metadata([1], [seq_len], metadata.block_table_RM[token : token + 1])
                place = slice(token, token + 1)
                expected.append(setup.taped.forward(x[place], positions[place], step))
            pages = setup.pool.clone()
            setup.pool.copy_(before)
            together = dataclasses.replace(metadata, shares_writes=True)
            assert setup.taped.accepts(together)
            assert torch.equal(setup.taped.forward(x, positions, together), torch.cat(expected))
            assert torch.equal(setup.pool, pages)
    finally:
        torch.set_num_threads(previous)


def test_taped_step_equals_itself_on_two_threads(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama")
    previous = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            for _ in range(20):
                setup.run_both([100, 3, 40])
    finally:
        torch.set_num_threads(previous)


def test_tape_refuses_steps_and_models_that_it_cannot_run(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama")
    table = make_table([20, 20], num_blocks=NUM_BLOCKS)
    decode = make_metadata([1, 1], [20, 20], table)
    assert setup.taped.accepts(decode)
    assert not setup.taped.accepts(make_metadata([1, 4], [20, 20], table))
    wide = torch.zeros(MAX_ROWS + 1, 2, dtype=torch.int32)
    assert not setup.taped.accepts(
        dataclasses.replace(decode, num_decode_rows=len(wide), num_tokens=len(wide), block_table_RM=wide)
    )
    assert not can_tape(setup.model, [])
    make_checkpoint(tmp_path / "float32", "llama", **SHAPE)
    placement = Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=128)
    model = load_model(tmp_path / "float32", RankPlace(), placement=placement, parts=PARTS)
    assert not can_tape(model, setup.pool.float().unbind())
    with pytest.raises(ValueError, match="cannot be taped"):
        TapedDecode(model, setup.pool.float().unbind())


def test_worker_generates_the_same_tokens_however_many_run_together(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", **SHAPE)
    prompts = [[5, 9, 200], [30] * 20, [7, 8]]
    together = generate(start_worker(worker_spec(path, dtype=DType.BFLOAT16)), prompts, num_output=20, chunk=64)
    alone = [
        generate(start_worker(worker_spec(path, dtype=DType.BFLOAT16)), [prompt], num_output=20, chunk=64)[0]
        for prompt in prompts
    ]
    assert together == alone
