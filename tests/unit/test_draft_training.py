"""Training of draft heads on a tiny model: what is unrolled is what will be drafted, and a kill changes nothing."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from support.dense_step import DenseCaches
from support.tiny_families import FAMILIES, VOCAB_SIZE, build, make_prompt, one_thread

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_drafter, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import Step
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.spec_decode.training.acceptance import Drafts, measure_acceptance
from blockferry.engine.spec_decode.training.base import BaseModel
from blockferry.engine.spec_decode.training.corpus import Writing, load_writings, save_writings
from blockferry.engine.spec_decode.training.examples import Examples
from blockferry.engine.spec_decode.training.head_folder import head_config, save_head
from blockferry.engine.spec_decode.training.loss import draft_loss
from blockferry.engine.spec_decode.training.module import DraftModule, Shape
from blockferry.engine.spec_decode.training.norm import rms_norm
from blockferry.engine.spec_decode.training.pipeline import Pipeline, PipelineSettings
from blockferry.engine.spec_decode.training.projection import initial_weights
from blockferry.engine.spec_decode.training.prompts import ChatFrame, Kind, PromptMaker, PromptSettings
from blockferry.engine.spec_decode.training.states import States, largest, normed
from blockferry.engine.spec_decode.training.trainer import Trainer, TrainSettings
from blockferry.engine.spec_decode.training.vocabulary import draft_vocabulary
from blockferry.engine.worker.parallel import LoneCommunicator

NUM_DRAFTS = 3
NUM_DRAFT_TOKENS = 100


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return BaseModel.load(build(FAMILIES["llama"], tmp_path_factory.getbasetemp() / "tiny_families"))


def random_weights(base, seed=1):
    """Of a module in which nothing is as the model has it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.16 * torch.randn(value.shape, generator=generator) + (value.ndim == 1)
        for name, value in initial_weights(base, make_examples(base)).items()
    }


def make_module(base, weights):
    return DraftModule(Shape.of(base), weights, base.cos_sin(128))


def shortlist():
    return torch.arange(0, VOCAB_SIZE, dtype=torch.int32)[-NUM_DRAFT_TOKENS:]


def make_corpus(base, num_sequences=12, length=40):
    """Random tokens with random states, as nothing here depends on where they come from."""
    generator = torch.Generator().manual_seed(5)
    writings = [
        Writing(token_ids=np.array(make_prompt(seed, length), np.int32), num_prompt_tokens=5)
        for seed in range(num_sequences)
    ]
    num_tokens = num_sequences * length
    states = States(
        hidden_NE=torch.randn(num_tokens, base.header.hidden_size, generator=generator).bfloat16(),
        top_ids_NK=torch.randint(VOCAB_SIZE, (num_tokens, 16), generator=generator, dtype=torch.int32),
        top_probs_NK=torch.full((num_tokens, 16), 1 / 16).bfloat16(),
    )
    return writings, states


def make_examples(base):
    writings, states = make_corpus(base)
    return Examples.of(writings, [states], shortlist(), VOCAB_SIZE)


def test_loss_and_gradient_are_those_of_plain_cross_entropy():
    torch.manual_seed(0)
    hidden, head = torch.randn(1100, 16, requires_grad=True), torch.randn(50, 16)
    ids, probs = torch.randint(50, (1100, 3)), torch.rand(1100, 3)

    loss = draft_loss(hidden, head, ids, probs)
    (gradient,) = torch.autograd.grad(0.5 * loss, hidden)

    expected = -(probs * (hidden @ head.T).log_softmax(-1).gather(1, ids)).sum()
    (expected_gradient,) = torch.autograd.grad(0.5 * expected, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


def test_norm_and_its_gradients_are_torchs():
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(3, 7, 16), torch.randn(16), torch.randn(3, 7, 16)
    x.requires_grad_()
    weight.requires_grad_()

    ours = rms_norm(x, weight, 1e-5)
    theirs = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)

    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (x, weight), gradient), torch.autograd.grad(theirs, (x, weight), gradient)
    )


def test_largest_are_those_of_topk():
    torch.manual_seed(0)
    x = torch.randn(5, 1024)

    values, places = largest(x, 16)

    torch.testing.assert_close(values, x.topk(16).values)
    torch.testing.assert_close(x.gather(1, places), values)


@torch.inference_mode()
def drafts_of_engine(base, head, prompt):
    """At every place of a prompt, what a worker's drafter drafts there: a pass over final tokens, then one by one."""
    speculation = SpeculationConfig(method=DraftMethod.MTP, num_tokens=NUM_DRAFTS, head_path=head)
    place, parts = RankPlace(), ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator())
    placement = Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=128)
    model = load_model(base.path, place, placement=placement, parts=parts)
    drafter = load_drafter(model, base.path, speculation=speculation, place=place, placement=placement, parts=parts)
    caches = DenseCaches()
    x_TE = model.forward(model.embed(torch.tensor(prompt)), Step(positions_T=torch.arange(len(prompt)), caches=caches))
    hidden_TE = drafter.normed(x_TE)
    found = []
    for place_i in range(len(prompt) - NUM_DRAFTS - 1):
        tokens, states, drafts = prompt[1 : place_i + 2], hidden_TE[: place_i + 1], []
        for draft in range(NUM_DRAFTS):
            # all at once instead of with a cache: keys before this place are those of the text, later ones the drafts'
            step = Step(positions_T=torch.arange(len(tokens)), caches=DenseCaches())
            output = drafter.forward(0, torch.tensor(tokens), states, step)
            drafts.append(int(drafter.best_tokens(output.normed_TE[-1:]).token_ids_S))
            tokens = [*tokens, prompt[place_i + 2 + draft]]
            states = torch.cat((states, output.handed_on_TE[-1:]))
        found.append(drafts)
    return hidden_TE, np.array(found).T


@torch.inference_mode()
def test_drafts_are_those_of_the_engine_that_reads_the_saved_folder(base, tmp_path):
    save_head(tmp_path, head_config(base.header, {}), random_weights(base), shortlist())
    saved = {name: weight.bfloat16().float() for name, weight in random_weights(base).items()}
    module, prompt = make_module(base, saved), make_prompt(3, 40)

    hidden_TE, expected = drafts_of_engine(base, tmp_path, prompt)
    num_places = expected.shape[1]
    tokens_ST = [prompt[1 + step : 1 + step + num_places] for step in range(NUM_DRAFTS)]
    weight = Checkpoint(base.path).tensor  # in float32, as the engine has them
    embedded = torch.nn.functional.embedding(torch.tensor(tokens_ST), weight("model.embed_tokens.weight"))[:, None]
    outputs = module(embedded, hidden_TE[None, :num_places], torch.zeros(1, dtype=torch.int64))
    head = weight("lm_head.weight")[shortlist().long()]

    assert shortlist()[(outputs[:, 0] @ head.T).argmax(-1)].tolist() == expected.tolist()
    assert len(np.unique(expected)) > 10  # not one token everywhere


def test_first_guess_of_a_linear_next_state_is_right(base):
    """Where the next state is a linear function of what a module reads, nothing is left to learn."""
    writings, states = make_corpus(base, num_sequences=60)
    size, generator = base.header.hidden_size, torch.Generator().manual_seed(2)
    token_ids = torch.from_numpy(np.concatenate([one.token_ids for one in writings])).long()
    matrix = torch.randn(2 * size, size, generator=generator) / size**0.5
    hidden = states.hidden_NE.float()

    def plain(x):
        return normed(x, torch.ones(size), base.header.norm_eps)

    for place in range(len(hidden) - 1):
        embedded = plain(base.embedding_VE[token_ids[place + 1]].float())
        hidden[place + 1] = plain(torch.cat((embedded, plain(hidden[place]))) @ matrix) * base.norm_E
    examples = Examples.of(writings, [dataclasses.replace(states, hidden_NE=hidden)], shortlist(), VOCAB_SIZE)
    module = make_module(base, initial_weights(base, examples))
    batch = examples.batch(examples.windows[:4], num_steps=1)

    with torch.inference_mode():
        guessed = module(base.embedding_VE.float()[batch.token_ids_SBT], batch.hidden_BTE, batch.first_B)[0, :, :-1]

    expected = batch.hidden_BTE[:, 1:]
    assert torch.nn.functional.cosine_similarity(guessed, expected, dim=-1).mean() > 0.98


def test_head_of_another_model_is_refused(base, tmp_path):
    other = dataclasses.replace(base.header, vocab_size=VOCAB_SIZE + 1)
    save_head(tmp_path, head_config(other, {}), random_weights(base), shortlist())

    with pytest.raises(ModelLoadError, match=f"base_vocab_size={VOCAB_SIZE + 1}"):
        drafts_of_engine(base, tmp_path, make_prompt(3, 8))


def test_model_with_other_layers_than_a_head_has_is_refused(tmp_path_factory):
    path = build(FAMILIES["gemma3_text"], tmp_path_factory.getbasetemp() / "tiny_families")

    with pytest.raises(ModelLoadError, match="no draft head can be trained for Gemma3ForCausalLM"):
        BaseModel.load(path)


class Killed(Exception):
    pass


def train(base, path, *, kill_at=None):
    examples = make_examples(base)
    module = make_module(base, initial_weights(base, examples))
    settings = TrainSettings(num_epochs=3, tokens_per_batch=160, learning_rate=1e-3, save_every_s=0.0)
    trainer = Trainer(module, base.embedding_VE, base.head_VE[shortlist().long()], settings)
    losses = []

    def tick(step):
        losses.append(step.loss)
        if step.number == kill_at:
            raise Killed

    trainer.run(examples, path, limit_s=1e9, tick=tick)
    return trainer, losses


def test_training_that_was_killed_ends_with_the_same_weights(base, tmp_path):
    whole, losses = train(base, tmp_path / "whole.pt")
    with pytest.raises(Killed):
        train(base, tmp_path / "killed.pt", kill_at=4)

    resumed, rest = train(base, tmp_path / "killed.pt")

    assert 0 < len(rest) < len(losses)
    for name, weight in whole.module.weights().items():
        assert torch.equal(weight, resumed.module.weights()[name]), name


def test_training_lowers_the_loss(base, tmp_path):
    _, losses = train(base, tmp_path / "training.pt")

    assert losses[-1] < losses[0]


def test_a_training_out_of_time_stops(base, tmp_path):
    module = make_module(base, random_weights(base))
    trainer = Trainer(module, base.embedding_VE, base.head_VE[shortlist().long()], TrainSettings(num_epochs=1000))

    trainer.run(make_examples(base), tmp_path / "training.pt", limit_s=1e-6, tick=lambda step: None)

    assert trainer.num_done == 1


def test_text_on_disk_is_what_was_written(base, tmp_path):
    writings, _ = make_corpus(base)

    save_writings(tmp_path / "text" / "00000.npz", writings)

    loaded = load_writings(tmp_path / "text" / "00000.npz")
    assert [(one.token_ids.tolist(), one.num_prompt_tokens) for one in loaded] == [
        (one.token_ids.tolist(), one.num_prompt_tokens) for one in writings
    ]
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["00000.npz"]


def test_shortlist_holds_what_the_model_wrote_most_and_then_low_ids():
    writings = [Writing(token_ids=np.array([9, 9, 30, 40, 40, 30, 30], np.int32), num_prompt_tokens=2)]

    assert draft_vocabulary(writings, vocab_size=50, num_tokens=4).tolist() == [0, 1, 30, 40]


@torch.inference_mode()
def test_acceptance_counts_drafts_that_the_text_goes_on_with(base):
    module = make_module(base, random_weights(base))
    writings, states = make_corpus(base, num_sequences=1)
    token_ids = torch.arange(VOCAB_SIZE, dtype=torch.int32)
    drafts = Drafts(module=module, embedding_VE=base.embedding_VE, head_VE=base.head_VE, token_ids=token_ids)
    examples = Examples.of(writings, [states], token_ids, VOCAB_SIZE)
    drafted_ST = drafts.of(examples.batch(examples.windows, num_steps=NUM_DRAFTS))[:, 0]
    text = writings[0].token_ids.copy()
    text[12] = drafted_ST[0, 10]  # the token at place i + 2 is the first draft at place i

    changed = [dataclasses.replace(writings[0], token_ids=text)]
    found = measure_acceptance(drafts, changed, examples, num_drafts=NUM_DRAFTS)

    num_places = len(text) - 2 - 4
    assert found.per_draft[0] >= 1 / num_places
    assert found.per_draft[0] >= found.per_draft[1] >= found.per_draft[2]
    assert 1.0 < found.tokens_per_step <= 1.0 + found.per_draft[0] * num_places


class Bytes:
    """A tokenizer of a model without chat template."""

    def encode(self, text):
        return [3 + ord(char) % (VOCAB_SIZE - 3) for char in text]

    def chat(self, message):
        return None

    def encode_chat(self, text):
        raise AssertionError(text)


class Chat(Bytes):
    """A tokenizer of a model with one."""

    def chat(self, message):
        return f"<{message}>"

    def encode_chat(self, text):
        return [{"<": 1, ">": 2}[char] for char in text]


def settings(**changes):
    small = PipelineSettings(
        num_tokens=1000,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_threads=1,
        num_rows=32,
        max_output_tokens=6,
        max_model_len=128,
        training=TrainSettings(num_epochs=1),
    )
    return dataclasses.replace(small, **changes)


@pytest.fixture(scope="session")
def tiny_run(base, tmp_path_factory):
    """A pipeline that has run once, with where it worked and what it reported."""
    folder, phases = tmp_path_factory.mktemp("training"), []
    with one_thread():
        pipeline = Pipeline(base.path, Bytes(), settings(), lambda progress: phases.append(progress.phase))
        head = pipeline.run(folder / "work", folder / "head")
    return pipeline, folder, head, phases


def test_a_head_is_trained_from_the_model_alone(base, tiny_run):
    _, folder, head, phases = tiny_run

    assert list(dict.fromkeys(phases)) == ["writing held-out text", "writing", "reading states", "training"]
    assert head.num_tokens >= 1000
    assert json.loads((folder / "head" / "config.json").read_text())["training"] == head.to_json()
    assert drafts_of_engine(base, folder / "head", make_prompt(3, 8))[1].shape == (NUM_DRAFTS, 4)


def test_nothing_is_done_twice(tiny_run):
    pipeline, folder, head, phases = tiny_run
    weights = (folder / "head" / "model.safetensors").read_bytes()
    phases.clear()

    again = pipeline.run(folder / "work", folder / "head")

    assert not phases
    assert again == head
    assert (folder / "head" / "model.safetensors").read_bytes() == weights


def test_a_work_folder_of_another_training_is_refused(tiny_run, tmp_path):
    pipeline, folder, *_ = tiny_run
    there = json.loads((folder / "work" / "settings.json").read_text())
    there["num_tokens"], there["training"]["seed"] = 5000, 3
    (tmp_path / "settings.json").write_text(json.dumps(there))

    with pytest.raises(ConfigError, match="another training, of tokens 5000, seed 3; ask for the same"):
        pipeline.run(tmp_path, tmp_path / "head")


def test_a_vocabulary_beyond_the_models_is_refused(base):
    with pytest.raises(ConfigError, match=f"500 is more than the model's {VOCAB_SIZE} tokens"):
        Pipeline(base.path, Bytes(), settings(num_draft_tokens=500), lambda progress: None)


def test_a_work_folder_that_cannot_be_made_is_named(tiny_run, tmp_path):
    pipeline, *_ = tiny_run
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="file/work cannot be written: Not a directory"):
        pipeline.run(tmp_path / "file" / "work", tmp_path / "head")


def test_chats_and_plain_text_are_both_written_about():
    maker = PromptMaker(Chat(), ChatFrame.of(Chat()), PromptSettings(), VOCAB_SIZE)
    rng = random.Random(0)

    kinds = maker.kinds(rng, 200)

    assert set(kinds) == set(Kind)
    for kind in Kind:
        prompt = maker.prompt(kind, [5, 6], rng).prompt
        assert prompt[:1] == (1,) if kind not in (Kind.PLAIN, Kind.NOISE) else len(prompt) >= 8
