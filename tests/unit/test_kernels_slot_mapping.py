"""The slot mapping kernel against its oracle."""

import itertools

import pytest
import torch
from support.paged import DEVICE

from blockferry.kernels.slot_mapping import slot_mapping, slot_mapping_torch

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("query_lens", "num_computed", "num_padded"),
    [
        ([1, 1, 1], [0, 15, 16], 0),
        ([1, 1, 300], [40, 3, 17], 0),
        ([5], [0], 3),
        ([2, 0, 3], [1, 9, 30], 2),
        ([1] * 300, list(range(300)), 7),
    ],
)
@pytest.mark.parametrize("block_size", [16, 24])
def test_slots_equal_the_oracle_and_padding_has_none(query_lens, num_computed, num_padded, block_size):
    torch.manual_seed(0)
    rows, num_tokens = len(query_lens), sum(query_lens) + num_padded
    table = torch.randint(1, 10_000_000, (rows, 24), dtype=torch.int32, device=DEVICE)[:, :21]
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=DEVICE)
    computed = torch.tensor(num_computed, dtype=torch.int32, device=DEVICE)
    out = torch.full((num_tokens,), 77, dtype=torch.int64, device=DEVICE)

    slot_mapping(table, starts, computed, block_size=block_size, out_T=out)

    expected = slot_mapping_torch(table, starts, computed, block_size=block_size, num_tokens=num_tokens)
    assert out.tolist() == expected.tolist()
    assert out.tolist()[num_tokens - num_padded :] == [-1] * num_padded


def test_a_step_without_rows_is_all_padding():
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slot_mapping(empty.view(0, 1), torch.zeros(1, dtype=torch.int32, device=DEVICE), empty, block_size=16, out_T=out)
    assert out.tolist() == [-1] * 4


def test_a_narrow_slot_tensor_is_refused_by_name():
    empty = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"out is torch.int32, the kernel takes torch.int64"):
        slot_mapping(empty.view(1, 1), torch.zeros(2, dtype=torch.int32), empty, block_size=16, out_T=empty)
