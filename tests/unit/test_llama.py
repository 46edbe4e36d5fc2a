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

from blockferry.engine.models.llama import Placement
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.worker.parallel import LoneCommunicator

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
    model = load_model(path, RankPlace(), placement=placement, ops=TorchOps(), communicator=LoneCommunicator())
    num_heads, num_kv_heads = model.config.num_heads, model.config.num_kv_heads

    def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        k_HTD, v_HTD = (x.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0) for x in (k_TKD, v_TKD))
        scaled = torch.nn.functional.scaled_dot_product_attention
        return scaled(q_THD.transpose(0, 1), k_HTD, v_HTD, is_causal=True).transpose(0, 1)

    with torch.inference_mode():
        hidden_TE = model.embed(torch.tensor(PROMPTS[2], dtype=torch.int32))
        hidden_TE = model.forward(hidden_TE, torch.arange(len(PROMPTS[2])), attend)
        logits_TV = model.logits(hidden_TE)

    torch.testing.assert_close(logits_TV, reference_logits(load_reference(path), PROMPTS[2]), atol=2e-4, rtol=1e-4)
