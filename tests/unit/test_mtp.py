"""Modules that draft tokens compute what transformers and plain torch compute, in float32, on any number of ranks.

Legend: T tokens, E hidden, V vocabulary.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from support.dense_step import DenseCaches, ThreadCommunicator, fresh_states
from support.tiny_families import load_reference, make_prompt, one_thread
from support.tiny_mtp import build_mtp, oracle_of
from transformers.modeling_layers import MtpModel

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_drafter, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import Step
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement

PROMPT = make_prompt(8, 60)
each_family = pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next", "qwen3_5"])


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def load(checkpoint, communicator, num_tokens):
    place = RankPlace(tp_rank=communicator.rank, tp_size=communicator.size)
    placement = Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=128)
    parts = ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=communicator)
    model = load_model(checkpoint.path, place, placement=placement, parts=parts)
    drafter = load_drafter(
        model,
        checkpoint.path,
        speculation=checkpoint.speculation(num_tokens),
        place=place,
        placement=placement,
        parts=parts,
    )
    assert drafter is not None
    return model, drafter


@torch.inference_mode()
def chain_on_rank(checkpoint, communicator):
    """Tokens drafted by each module in turn, their chances, and what the head read for the last of them."""
    model, drafter = load(checkpoint, communicator, checkpoint.num_modules)
    caches = DenseCaches(fresh_states(checkpoint.path, len(PROMPT) - 1, tp_size=communicator.size))
    step = Step(positions_T=torch.arange(len(PROMPT) - 1), caches=caches)
    hidden_TE = drafter.normed(model.forward(model.embed(torch.tensor(PROMPT[:-1])), step))
    token_ids, drafts, chances, normed = PROMPT[1:], [], [], []
    for depth in range(len(drafter.modules)):
        output = drafter.forward(depth, torch.tensor(token_ids), hidden_TE, step)
        best = drafter.best_tokens(output.normed_TE[-1:])
        drafts += best.token_ids_S.tolist()
        chances += best.chances_S.tolist()
        normed.append(output.normed_TE[-1])
        token_ids, hidden_TE = [*token_ids[1:], drafts[-1]], output.handed_on_TE
    return drafts, chances, torch.stack(normed)


def chain(checkpoint, tp_size=1):
    communicators = ThreadCommunicator.ranks(tp_size)
    with ThreadPoolExecutor(tp_size) as pool:
        return [rank.result() for rank in [pool.submit(chain_on_rank, checkpoint, one) for one in communicators]]


@each_family
@pytest.mark.parametrize("tp_size", [1, 2])
@torch.inference_mode()
def test_a_chain_of_modules_computes_what_plain_torch_does(family, tp_size, folder):
    checkpoint = build_mtp(family, folder, num_modules=2)
    drafts, chances, normed_TE = chain(checkpoint, tp_size)[0]
    logits_TV = load_reference(checkpoint.path).lm_head(normed_TE)
    torch.testing.assert_close(logits_TV, oracle_of(checkpoint).logits(PROMPT, 2), atol=5e-5, rtol=1e-4)
    assert drafts == oracle_of(checkpoint).drafts(PROMPT, 2)
    assert chances == pytest.approx(logits_TV.softmax(-1).amax(-1).tolist(), rel=1e-4)


@torch.inference_mode()
def test_deepseek_drafts_what_transformers_mtp_model_drafts(folder):
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    reference._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45].*"]  # it knows layer 61 only
    modules = MtpModel.from_pretrained(reference).eval()
    hidden_TE = reference.model(torch.tensor([PROMPT[:-1]])).last_hidden_state
    positions = torch.arange(1, len(PROMPT))[None]
    cache = transformers.cache_utils.MtpCache(config=reference.config.get_mtp_config())
    expected, _, _ = modules(torch.tensor([PROMPT[1:]]), hidden_TE, None, positions, cache)
    assert chain(checkpoint)[0][0] == expected[0].tolist()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_finds_the_best_token_of_a_shortlist(tp_size, folder):
    shortlist = [3, 5, 8, 40, 41, 42, 43, 95, 96]  # the last ranks of four have none
    checkpoint = build_mtp("llama", folder, shortlist=shortlist)
    expected = oracle_of(checkpoint).drafts(PROMPT, 1)
    assert expected[0] in shortlist
    made = chain(checkpoint, tp_size)
    assert [drafts for drafts, *_ in made] == [expected] * tp_size
    chances = [chances for _, chances, _ in made]
    assert chances == [chances[0]] * tp_size  # ranks that disagreed would not draft equally far
    assert chances[0] == pytest.approx(oracle_of(checkpoint).logits(PROMPT, 1).softmax(-1).amax(-1).tolist(), rel=1e-4)


def test_modules_that_are_missing_are_named(folder):
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=1)
    config = checkpoint.path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 3'))
    try:
        with pytest.raises(ModelLoadError, match=r"model\.layers\.5\.[a-z_.]+ is in no safetensors file"):
            load(checkpoint, ThreadCommunicator.ranks(1)[0], 3)
    finally:
        config.write_text(text)
