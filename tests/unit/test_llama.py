"""Every option of the Llama family computes what transformers computes, in float32."""

import random
from pathlib import Path

import pytest
import torch
from support.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    load_reference,
    make_checkpoint,
    reference_greedy,
    reference_logits,
)
from support.worker_driver import generate, start_worker, worker_spec

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.parallel import LoneCommunicator


class DenseCaches:
    """Attention of one whole prompt, without pages."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        groups = q_THD.shape[1] // k_TKD.shape[1]
        k_HTD, v_HTD = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (k_TKD, v_TKD))
        scaled = torch.nn.functional.scaled_dot_product_attention
        return scaled(q_THD.transpose(0, 1), k_HTD, v_HTD, is_causal=True, scale=rule.scale).transpose(0, 1)

    def attend_latent(
        self, layer: int, q_THR: torch.Tensor, latent_TR: torch.Tensor, rule: AttentionRule, *, value_dim: int
    ) -> torch.Tensor:
        raise AssertionError(layer)

    def states(self, layer: int) -> LayerStates:
        raise AssertionError(layer)


_RNG = random.Random(8)
PROMPTS = [[_RNG.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 23, 90)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    worker = start_worker(worker_spec(path))

    outputs = generate(worker, PROMPTS, num_output=12, chunk=40)

    reference = load_reference(path)
    assert outputs == [reference_greedy(reference, prompt, 12) for prompt in PROMPTS]
    assert len({token for output in outputs for token in output}) > 10  # not a degenerate model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    placement = Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=128)
    model = load_model(
        path,
        RankPlace(),
        placement=placement,
        parts=ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator()),
    )

    with torch.inference_mode():
        hidden_TE = model.embed(torch.tensor(PROMPTS[2], dtype=torch.int32))
        hidden_TE = model.forward(hidden_TE, Step(positions_T=torch.arange(len(PROMPTS[2])), caches=DenseCaches()))
        logits_TV = model.logits(hidden_TE)

    torch.testing.assert_close(logits_TV, reference_logits(load_reference(path), PROMPTS[2]), atol=2e-4, rtol=1e-4)
