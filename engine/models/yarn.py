"""Rotary tables with YaRN: long waves are slowed, short ones kept, and attention is sharpened by scaling both.

Pure arithmetic; owns nothing. Computes what transformers 5 computes from the same config.json.
Source: Peng et al., YaRN (arXiv 2309.00071), 3.2 to 3.4; transformers' modeling_rope_utils.py for defaults.

Legend: D rotated dims of a head.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from blockferry.engine.kv.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """YaRN's part of a config.json."""

    theta: float
    factor: float  # of the trained length
    original_max_positions: int
    beta_fast: float = 32.0  # waves that turn more often within the trained length are kept
    beta_slow: float = 1.0  # waves that turn less often are slowed by the whole factor
    attention_factor: float = 1.0  # of cosines and sines
    is_truncated: bool = True  # the bounds between both are moved to whole dims


def yarn_config(scaling: ModelConfig, *, theta: float, max_positions: int) -> YarnConfig:
    """Read rope_parameters (or rope_scaling); theta is what the model has where they name none.

    Raises ConfigError for what is wrong.
    """
    original = scaling.integer("original_max_position_embeddings", default=max_positions)
    factor = scaling.number("factor", default=max_positions / original, above=0.0)
    return YarnConfig(
        theta=scaling.number("rope_theta", default=theta, above=1.0),
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", default=32.0, above=0.0),
        beta_slow=scaling.number("beta_slow", default=1.0, above=0.0),
        attention_factor=_attention_factor(scaling, factor),
        is_truncated=scaling.flag("truncate", default=True),
    )


def yarn_table(config: YarnConfig, *, head_dim: int, max_len: int) -> torch.Tensor:
    """float32 [max_len, D]: cosines then sines of every position, as layers.rope_table lays them out."""
    angles = torch.arange(max_len, dtype=torch.float)[:, None] * _frequencies(config, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * config.attention_factor


def sharpening(factor: float, weight: float = 1.0) -> float:
    """The factor by which YaRN scales queries and keys: 0.1 weight ln(factor) + 1, and 1 without stretching."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(scaling: ModelConfig, factor: float) -> float:
    stated = scaling.find_number("attention_factor")
    if stated is not None:
        return stated
    weight, weight_of_all = scaling.find_number("mscale"), scaling.find_number("mscale_all_dim")
    if weight and weight_of_all:
        return sharpening(factor, weight) / sharpening(factor, weight_of_all)
    return sharpening(factor)


def _frequencies(config: YarnConfig, head_dim: int) -> torch.Tensor:
    """float32 [D/2]: radians per position."""
    waves = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    low, high = _dim_of(config, config.beta_fast, head_dim), _dim_of(config, config.beta_slow, head_dim)
    if config.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = 0.001 if low == high else high - low
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (config.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _dim_of(config: YarnConfig, num_turns: float, head_dim: int) -> float:
    """The pair of dims, not rounded, whose wave turns so often within the trained length."""
    length_of_turn = config.original_max_positions / (num_turns * 2 * math.pi)
    return head_dim * math.log(length_of_turn) / (2 * math.log(config.theta))
