"""Recurrent states between ranks of any number: each gets the part of the model's whole state that its layers read."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.connectors.base import TransferPart
from blockferry.connectors.layout import intersect_runs
from blockferry.engine.kv.model_layers import LayerOptions, layers_of
from blockferry.engine.kv.plan import Planner, PlanRequest
from blockferry.engine.kv.planners import plan_with
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.models.delta_net import DeltaHeads, DeltaShape
from blockferry.engine.models.mamba import Mamba2Shape
from blockferry.engine.models.sharding import Span, split_evenly
from blockferry.engine.worker.page_views import PageDTypes, PageViews
from blockferry.engine.worker.pool_layouts import HeldHeads, pool_layouts

BASE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 8}
DTYPES = PageDTypes(kv=torch.float32, states=(torch.float32, torch.float32))
TP_SIZES = (1, 2, 4, 8)


@st.composite
def models(draw):
    """config.json of a model with states that 8 ranks can share."""
    hidden_size = draw(st.sampled_from([32, 64]))
    config = BASE | {"hidden_size": hidden_size, "dtype": "float32"}
    match draw(st.sampled_from(["mamba1", "mamba2", "delta net", "short convolution"])):
        case "mamba1":
            own = {"model_type": "jamba", "mamba_d_state": draw(st.integers(1, 5)), "attn_layer_period": 2}
            return config | own | {"attn_layer_offset": 1, "mamba_d_conv": draw(st.integers(2, 4))}
        case "mamba2":
            own = {"model_type": "bamba", "mamba_n_groups": draw(st.sampled_from([1, 2, 4, 8])), "mamba_n_heads": 8}
            return config | own | {"attn_layer_indices": [1], "mamba_d_state": draw(st.integers(1, 5))}
        case "delta net":
            own = {
                "model_type": "qwen3_next",
                "linear_num_key_heads": 8,
                "linear_key_head_dim": draw(st.integers(1, 4)),
            }
            values = {"linear_num_value_heads": draw(st.sampled_from([8, 16, 24])), "linear_value_head_dim": 3}
            return config | own | values
        case _:
            return config | {"model_type": "lfm2", "full_attn_idxs": [1], "conv_L_cache": draw(st.integers(2, 4))}


def spec_of(config, tp_size):
    options = LayerOptions(block_size=16, tp_size=tp_size)
    return next(spec for spec in layers_of(config, options).layers if isinstance(spec, MambaSpec))


def held_rows(config, tensor, tp_rank, tp_size):
    """Rows of the whole state's tensor that a rank's layers read, as the models slice their weights."""
    if tensor == 1:
        num_rows = spec_of(config, 1).shapes[1][0]
        return rows_of([split_evenly(num_rows, tp_rank, tp_size)])
    match config["model_type"]:
        case "bamba":
            num_heads, num_groups = config["mamba_n_heads"], config["mamba_n_groups"]
            heads = split_evenly(num_heads, tp_rank, tp_size)
            per_group = num_heads // num_groups
            shape = Mamba2Shape(
                num_heads=num_heads,
                head_dim=2 * config["hidden_size"] // num_heads,
                num_groups=num_groups,
                state_size=config["mamba_d_state"],
                num_taps=4,
                heads=heads,
                groups=Span(start=heads.start // per_group, stop=-(-heads.stop // per_group)),
            )
            return rows_of(shape.conv_rows)
        case "qwen3_next":
            num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
            shape = DeltaShape(
                num_key_heads=num_keys,
                num_value_heads=num_values,
                key_dim=config["linear_key_head_dim"],
                value_dim=config["linear_value_head_dim"],
                num_taps=4,
            )
            heads = DeltaHeads(
                key=split_evenly(num_keys, tp_rank, tp_size), value=split_evenly(num_values, tp_rank, tp_size)
            )
            return rows_of(shape.conv_rows(heads))
        case _:
            return rows_of([split_evenly(spec_of(config, 1).shapes[0][0], tp_rank, tp_size)])


def rows_of(spans):
    return [row for span in spans for row in range(span.start, span.stop)]


class Rank:
    """A pool of two layers' states."""

    def __init__(self, spec, *, tp_rank, tp_size, order):
        limits = SequenceLimits(max_model_len=32, max_in_flight_tokens=16)
        request = PlanRequest(layers=(spec,) * 2, limits=limits, memory_bytes=1 << 18, layout=order)
        plan = plan_with(Planner.UNIFORM, request)
        self.memory = np.zeros(plan.pool_bytes, np.uint8)
        self.views = PageViews(plan, torch.from_numpy(self.memory), layout=order, dtypes=DTYPES).layers
        heads = HeldHeads(span=Span(start=0, stop=1))
        self.layouts = pool_layouts(
            plan, order=order, dtype="float32", kv_heads=heads, tp_rank=tp_rank, tp_size=tp_size
        )


def ranks_of(spec, tp_size, order):
    return [Rank(spec, tp_rank=rank, tp_size=tp_size, order=order) for rank in range(tp_size)]


def move(source, target, part):
    for mine, theirs in itertools.product(source.layouts, target.layouts):
        runs = intersect_runs(mine, theirs, part)
        for s, d, n in zip(runs.src_offsets.tolist(), runs.dst_offsets.tolist(), runs.lengths.tolist()):
            target.memory[d : d + n] = source.memory[s : s + n]


@given(
    config=models(),
    sizes=st.tuples(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES)),
    orders=st.tuples(st.sampled_from(["BHLNC", "LBNHC"]), st.sampled_from(["BHLNC", "BLHNC"])),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_gets_its_rows_of_the_whole_state(config, sizes, orders):
    whole_spec, *specs = (spec_of(config, size) for size in (1, *sizes))
    rng = np.random.default_rng(0)
    whole = {
        (layer, tensor): torch.from_numpy(rng.random(shape, np.float32))
        for layer, (tensor, shape) in itertools.product(range(2), enumerate(whole_spec.shapes))
    }
    sources, targets = (ranks_of(*shape) for shape in zip(specs, sizes, orders))
    part = TransferPart(
        src_group=0,
        dst_group=0,
        src_block_ids=np.array([3], np.int32),
        dst_block_ids=np.array([1], np.int32),
        num_tokens=1,
    )
    for rank, source in enumerate(sources):
        for (layer, tensor), values in whole.items():
            source.views[layer][tensor][3] = values[held_rows(config, tensor, rank, sizes[0])]

    for source, target in itertools.product(sources, targets):
        move(source, target, part)

    for rank, target in enumerate(targets):
        for (layer, tensor), values in whole.items():
            assert torch.equal(target.views[layer][tensor][1], values[held_rows(config, tensor, rank, sizes[1])])
            target.views[layer][tensor][1] = 0
        assert not target.memory.any(), "bytes outside of the block have changed"


@given(config=models(), tp_size=st.sampled_from(TP_SIZES))
@settings(max_examples=60, deadline=None)
def test_fields_name_every_row_of_every_tensor(config, tp_size):
    spec = spec_of(config, tp_size)
    named = [sum(field.num_rows(tp_size) for field in fields) for fields in spec.fields]
    assert named == [shape[0] for shape in spec.shapes]


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_ranks_that_share_a_group_say_which_copy_they_hold(num_groups):
    config = BASE | {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 2}
    spec = spec_of(config | {"hidden_size": 32, "dtype": "float32", "mamba_n_groups": num_groups}, 4)
    held = [
        (layout.head_start, layout.copy, layout.num_copies)
        for rank in ranks_of(spec, 4, "BHLNC")
        for layout in rank.layouts
        if layout.field == "conv.b"
    ]
    num_copies = 4 // num_groups
    assert held == [(rank // num_copies, rank % num_copies, num_copies) for rank in range(4)]
