"""Mamba mixers, and the families built of them, compute what transformers computes, on any number of ranks."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.checkpoints import edit_config
from support.dense_step import DenseCaches, ThreadCommunicator, dense_logits
from support.moe_blocks import make_build
from support.state_oracles import make_pool, make_step
from support.tiny_families import FAMILIES, build, checkpoint, load_reference, make_prompt, one_thread, reference_logits

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.model_states import StateOptions, mamba1_state, mamba2_state
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.mamba import GateOrder, Mamba1Mixer, Mamba2Mixer, Mamba2Options, mamba2_shape
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.weights import WeightReader

PROMPT = make_prompt(3, 90)
RANKS = [(name, tp_size) for name in ("jamba", "bamba") for tp_size in (1, 2, 4)] + [("falcon_h1", 1), ("falcon_h1", 2)]
VARIANTS = {
    "jamba": {
        "no_experts": {"num_experts": 1},
        "experts_in_other_layers": {"expert_layer_period": 3, "expert_layer_offset": 0},
        "biases": {"mamba_proj_bias": True},
        "no_conv_bias": {"mamba_conv_bias": False},
        "dt_rank_of_its_own": {"mamba_dt_rank": "auto", "mamba_d_conv": 3, "mamba_d_state": 24},
        "tied": {"tie_word_embeddings": True},
    },
    "bamba": {
        "a_group_per_rank": {"mamba_n_groups": 2},
        "groups_on_one_rank": {"mamba_n_groups": 4},
        "biases": {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        "no_conv_bias": {"mamba_conv_bias": False},
        "whole_heads_rotated": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        "quarter_heads_rotated": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25}},
        "short_steps": {"time_step_limit": [0.05, 0.1]},
        "no_step_above": {"time_step_limit": [0.05, float("inf")]},
    },
    "falcon_h1": {
        "gate_alone": {"mamba_rms_norm": False},
        "norm_before_gate": {"mamba_norm_before_gate": True},
        "one_group": {"mamba_n_groups": 1},
        "one_group_normed_before_gate": {"mamba_n_groups": 1, "mamba_norm_before_gate": True},
        "biases": {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True},
        "no_factors": {"ssm_multipliers": None, "mlp_multipliers": None, "key_multiplier": 1.0},
        "inner_size_by_factor": {"mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_head": 16},
    },
}


def variant(name, folder, changes):
    """The checkpoint of a family's tiny model with another config.json."""
    family = FAMILIES[name]

    def make_config():
        config = family.make_config()
        return type(config)(**{**config.to_dict(), **changes})

    return build(dataclasses.replace(family, make_config=make_config), folder)


def assert_logits_are_those_of_transformers(folder, *, tp_size):
    with one_thread():
        logits = dense_logits(folder, PROMPT, tp_size=tp_size)
    torch.testing.assert_close(logits, reference_logits(folder, PROMPT), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "tp_size"), RANKS)
def test_logits_equal_transformers_on_any_number_of_ranks(name, tp_size, tmp_path_factory):
    assert_logits_are_those_of_transformers(checkpoint(name, tmp_path_factory), tp_size=tp_size)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in VARIANTS for name in VARIANTS[family]])
def test_logits_of_a_variant_equal_transformers(family, name, tmp_path):
    assert_logits_are_those_of_transformers(variant(family, tmp_path, VARIANTS[family][name]), tp_size=2)


def test_four_ranks_share_two_groups(tmp_path):
    assert_logits_are_those_of_transformers(variant("bamba", tmp_path, {"mamba_n_groups": 2}), tp_size=4)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1"])
def test_an_old_config_means_what_transformers_takes_it_for(name, tmp_path):
    folder = variant(name, tmp_path, {})
    values = json.loads((folder / "config.json").read_text())
    silent = {"rope_parameters", "rms_norm_eps", "time_step_limit"}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if key not in silent} | {"rope_theta": 5000.0})
    )
    assert_logits_are_those_of_transformers(folder, tp_size=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixerCase:
    """One layer of a family's tiny model, and its mixer."""

    family: str
    layer: int
    shapes: object  # StateReader

    def reference(self, folder, x_TE):
        """What transformers computes from the start, [T, E]."""
        with torch.inference_mode():
            return load_reference(folder).model.layers[self.layer].mamba(x_TE[None])[0]

    def mixer(self, made):
        if self.family == "jamba":
            return Mamba1Mixer(made, self.layer)
        scales = (0.9, 1.1, 1.2, 0.8, 1.3) if self.family == "falcon_h1" else None
        options = Mamba2Options(gate_order=GateOrder.GATE_THEN_NORM, feature_scales=scales)
        return Mamba2Mixer(made, self.layer, mamba2_shape(made), options)

    def pools(self, made, *, num_blocks, dtype=torch.float32):
        shapes = self.shapes(made.config, StateOptions(tp_size=made.place.tp_size))
        return tuple(make_pool(num_blocks, shape, dtype=dtype)[1] for shape in (shapes.conv, shapes.recurrent))


CASES = [
    MixerCase(family="jamba", layer=1, shapes=mamba1_state),
    MixerCase(family="bamba", layer=2, shapes=mamba2_state),
    MixerCase(family="falcon_h1", layer=0, shapes=mamba2_state),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.family for case in CASES])


def inputs(num_tokens, *, seed=0):
    """Random hidden states, which Falcon-H1's mixer alone would scale by 1.2 first."""
    return torch.randn((num_tokens, 64), generator=torch.Generator().manual_seed(seed))


def scaled(case, x_TE):
    return x_TE * 1.2 if case.family == "falcon_h1" else x_TE


def step_of(case, pools, metadata):
    states = LayerStates(tensors=pools, metadata=metadata)
    positions_T = torch.zeros(metadata.num_tokens, dtype=torch.int64)
    return Step(positions_T=positions_T, caches=DenseCaches({case.layer: states}))


@each_case
def test_a_sequence_cut_into_steps_beside_others_equals_transformers(case, tmp_path_factory):
    folder = checkpoint(case.family, tmp_path_factory)
    made = make_build(folder, RankPlace())
    mixer, pools = case.mixer(made), case.pools(made, num_blocks=8)
    x_TE, other_TE = inputs(40), inputs(30, seed=1)

    def run(parts, metadata):
        with torch.inference_mode():
            return mixer(scaled(case, torch.cat(parts)), step_of(case, pools, metadata))

    # the state moves from block to block: 5 -> 2 -> 2 -> 7, the other row's stays in 4
    first_TE = run([x_TE[:17]], make_step([17], fresh=(0,), source=[0], target=[5]))
    second_TE = run([x_TE[17:38], other_TE[:29]], make_step([21, 29], fresh=(1,), source=[5, 0], target=[2, 4]))
    third_TE = run([other_TE[29:], x_TE[38:39]], make_step([1, 1], num_decode_rows=2, source=[4, 2], target=[4, 2]))
    fourth_TE = run([x_TE[39:]], make_step([1], num_decode_rows=1, source=[2], target=[7]))

    whole_TE = torch.cat((first_TE, second_TE[:21], third_TE[1:], fourth_TE))
    torch.testing.assert_close(whole_TE, case.reference(folder, x_TE), atol=1e-5, rtol=1e-5)
    other_out_TE = torch.cat((second_TE[21:], third_TE[:1]))
    torch.testing.assert_close(other_out_TE, case.reference(folder, other_TE), atol=1e-5, rtol=1e-5)


@each_case
def test_two_ranks_compute_what_one_computes(case, tmp_path_factory):
    folder, x_TE = checkpoint(case.family, tmp_path_factory), inputs(40)

    @torch.inference_mode()
    def run(communicator):
        place = RankPlace(tp_rank=communicator.rank, tp_size=communicator.size)
        made = dataclasses.replace(make_build(folder, place), communicator=communicator)
        pools = case.pools(made, num_blocks=1)
        return case.mixer(made)(x_TE.clone(), step_of(case, pools, make_step([40], fresh=(0,))))

    with ThreadPoolExecutor(2) as pool:
        sharded = list(pool.map(run, ThreadCommunicator.ranks(2)))
    [whole_TE] = map(run, ThreadCommunicator.ranks(1))

    assert torch.equal(*sharded)
    torch.testing.assert_close(sharded[0], whole_TE, atol=1e-5, rtol=1e-5)


@each_case
def test_bfloat16_is_near_float32(case, tmp_path_factory):
    folder, x_TE = checkpoint(case.family, tmp_path_factory), inputs(40)
    made = make_build(folder, RankPlace())
    placement = dataclasses.replace(made.weights.placement, dtype=torch.bfloat16)
    made = dataclasses.replace(made, weights=WeightReader(Checkpoint(folder), placement, adds_row_bias=True))
    pools = case.pools(made, num_blocks=1, dtype=torch.bfloat16)

    with torch.inference_mode(), one_thread():
        step = step_of(case, pools, make_step([40], fresh=(0,)))
        out_TE = case.mixer(made)(scaled(case, x_TE).bfloat16(), step)

    assert out_TE.dtype is torch.bfloat16
    expected_TE = case.reference(folder, x_TE)
    assert (out_TE.float() - expected_TE).abs().max() < 0.03 * expected_TE.abs().max()


REFUSALS = [
    ("jamba", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; supported: silu"),
    ("bamba", {"hidden_act": "relu"}, "hidden_act=relu is not supported; supported: silu"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; it must be a list of 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is .*; it must be a list of 2 numbers"),
    ("bamba", {"mamba_d_state": 8}, r"in_proj.weight has shape \(296, 64\), config.json says"),
]


@pytest.mark.parametrize(("name", "changes", "complaint"), REFUSALS, ids=[complaint for *_, complaint in REFUSALS])
def test_what_cannot_be_computed_is_refused_by_name(name, changes, complaint, tmp_path):
    folder = variant(name, tmp_path, {})
    edit_config(folder, **changes)

    with pytest.raises(ModelLoadError, match=complaint):
        dense_logits(folder, PROMPT)


def test_ranks_whose_heads_would_read_parts_of_two_groups_are_refused(tmp_path):
    changes = {"mamba_expand": 3, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 3}

    with pytest.raises(ModelLoadError, match="4 ranks cannot share 12 Mamba heads in 3 groups"):
        dense_logits(variant("bamba", tmp_path, changes), PROMPT, tp_size=4)
