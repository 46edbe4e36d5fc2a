"""State of one recurrent layer, by family: the shapes of its tensors on one rank, and what their rows are.

Shapes are those that the models' authors and transformers use (models/*/modeling_*.py), with the last kernel - 1
inputs for a convolution, which is all that the next token needs: drafts have whole states to roll back to, in blocks of
their own. Knows configs, nothing of blocks.

Legend: D inner channels, H heads, P head dim, N state size, G groups, K convolution kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.state_fields import StateField

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateShapes:
    """Of one layer: the convolution's last inputs, and the recurrent state where there is one.

    Fields are in the order of their tensor's rows. Those of a convolution lie as the models' weights are sliced: see
    CausalConvolution (models/mamba.py), read_delta_net (models/delta_net.py), ShortConvolution (models/lfm2.py).
    """

    conv: Shape
    conv_fields: tuple[StateField, ...]
    recurrent: Shape | None = None
    recurrent_fields: tuple[StateField, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """What shapes depend on besides the model."""

    tp_size: int = 1


StateReader = Callable[[ModelConfig, StateOptions], StateShapes]


def mamba1_state(config: ModelConfig, options: StateOptions) -> StateShapes:
    """Mamba and Jamba: [D, K-1] and [D, N]."""
    expand = config.integer("mamba_expand", "expand", default=2)
    inner = config.find_integer("mamba_d_inner") or expand * config.integer("hidden_size", "d_model")
    channels = _share(inner, options, "inner channels")
    kernel = config.integer("mamba_d_conv", "conv_kernel", "d_conv", default=4)
    state = config.integer("mamba_d_state", "state_size", "d_state", default=16)
    return StateShapes(
        conv=(channels, kernel - 1),
        conv_fields=(StateField(name="conv", num_units=inner, rows_per_unit=1),),
        recurrent=(channels, state),
        recurrent_fields=(StateField(name="recurrent", num_units=inner, rows_per_unit=1),),
    )


def mamba2_state(config: ModelConfig, options: StateOptions) -> StateShapes:
    """Mamba 2, Bamba, Falcon-H1, Granite 4, Nemotron-H: [D + 2 G N, K-1] and [H, P, N].

    Fewer groups than ranks are copied to ranks, so that each has what its heads need.
    """
    heads = config.integer("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = _mamba2_inner(config, heads)
    groups = config.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    num_held_groups = max(groups, options.tp_size) if groups % options.tp_size else groups
    state = config.integer("mamba_d_state", "ssm_state_size", "state_size")
    kernel = config.integer("mamba_d_conv", "conv_kernel", default=4)
    channels = _share(inner, options, "inner channels") + 2 * _share(num_held_groups, options, "groups") * state
    return StateShapes(
        conv=(channels, kernel - 1),
        conv_fields=(
            StateField(name="conv.x", num_units=heads, rows_per_unit=inner // heads),
            StateField(name="conv.b", num_units=groups, rows_per_unit=state),
            StateField(name="conv.c", num_units=groups, rows_per_unit=state),
        ),
        recurrent=(_share(heads, options, "Mamba heads"), inner // heads, state),
        recurrent_fields=(StateField(name="recurrent", num_units=heads, rows_per_unit=1),),
    )


def gated_delta_net_state(config: ModelConfig, options: StateOptions) -> StateShapes:
    """Qwen3-Next and Qwen3.5: [2 Hk Pk + Hv Pv, K-1] and [Hv, Pk, Pv]."""
    num_keys, num_values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    key_heads = _share(num_keys, options, "key heads of linear attention")
    value_heads = _share(num_values, options, "value heads of linear attention")
    key_dim = config.integer("linear_key_head_dim")
    value_dim = config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim", default=4)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateShapes(
        conv=(channels, kernel - 1),
        conv_fields=(
            StateField(name="conv.q", num_units=num_keys, rows_per_unit=key_dim),
            StateField(name="conv.k", num_units=num_keys, rows_per_unit=key_dim),
            StateField(name="conv.v", num_units=num_values, rows_per_unit=value_dim),
        ),
        recurrent=(value_heads, key_dim, value_dim),
        recurrent_fields=(StateField(name="recurrent", num_units=num_values, rows_per_unit=1),),
    )


def short_conv_state(config: ModelConfig, options: StateOptions) -> StateShapes:
    """LFM2: [D, K-1] alone."""
    num_channels = config.integer("hidden_size")
    channels = _share(num_channels, options, "convolution channels")
    kernel = config.integer("conv_L_cache", default=3)
    return StateShapes(
        conv=(channels, kernel - 1),
        conv_fields=(StateField(name="conv", num_units=num_channels, rows_per_unit=1),),
    )


def _mamba2_inner(config: ModelConfig, heads: int) -> int:
    inner = config.find_integer("mamba_d_ssm")
    if inner is None:
        head_dim = config.text("mamba_d_head", "auto")
        named = (
            config.find_integer("mamba_head_dim", "head_dim") if head_dim == "auto" else config.integer("mamba_d_head")
        )
        expanded = config.integer("mamba_expand", "expand", default=2) * config.integer("hidden_size")
        has_named_heads = config.find_integer("mamba_num_heads", "num_heads") is not None
        inner = heads * named if named is not None and has_named_heads else expanded
    if inner % heads:
        raise ConfigError("config.json", f"{inner} inner channels cannot be split into {heads} Mamba heads")
    return inner


def _share(count: int, options: StateOptions, what: str) -> int:
    if count % options.tp_size:
        raise ConfigError(
            "tp", f"{count} {what} cannot be shared by {options.tp_size} ranks; use a divisor of {count} for tp"
        )
    return count // options.tp_size
