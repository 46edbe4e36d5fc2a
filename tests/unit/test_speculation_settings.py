"""The `speculation` section of a deployment: what it becomes, who is told of it, and how each mistake is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.deployments import LLAMA, PD

from blockferry.cluster import bring_up
from blockferry.cluster.check import Level, check_deployment
from blockferry.cluster.deployment import Deployment, load_deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.running import Running
from blockferry.cluster.shipped import shipped_models
from blockferry.cluster.speculation_settings import words_of
from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.instance_plan import InstancePlan

HEAD = {
    "model_type": "llama_mtp",
    "num_nextn_predict_layers": 1,
    "hidden_size": 72,
    "base_num_hidden_layers": 4,
    "base_vocab_size": 256,
}
OWN = json.loads(shipped_models()["deepseek-v3"].read_text()) | {"num_hidden_layers": 4}
STATES = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "full_attn_idxs": [1, 3], "conv_L_cache": 3} | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BART_SIZES = ("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "vocab_size")
BART_COUNTS = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
BART = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "is_encoder_decoder": True,
    **dict.fromkeys(BART_SIZES, 64),
    **dict.fromkeys(BART_COUNTS, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, {})
    write_head(tmp_path, {})
    return tmp_path


def write_model(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA | changes))


def write_head(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "head").mkdir(exist_ok=True)
    (folder / "head" / "config.json").write_text(json.dumps(HEAD | changes))
    save_file({"draft_token_ids": np.arange(9, dtype=np.int32)}, folder / "head" / "model.safetensors")


def load(folder: Path, speculation: str, rest: str = "") -> Deployment:
    file = folder / "deployment.yaml"
    file.write_text(f"{PD}cache: {{memory: 8MiB}}\nspeculation: {speculation}\n{rest}")
    return load_deployment(file)


def plan(deployment: Deployment) -> InstancePlan:
    config = deployment.config
    return plan_of(config.model, deployment.header, config.instances[0], where="")


def test_a_section_is_of_every_instance(folder: Path) -> None:
    text = "{method: ngram, num_tokens: 5, adaptive: false, min_ngram: 3, max_ngram: 6}"
    expected = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=5, is_adaptive=False, min_ngram=3, max_ngram=6)
    instances = load(folder, text, "scheduler: {max_num_seqs: 8}\n").config.instances
    assert [one.scheduler.speculation for one in instances] == [expected, expected]


@pytest.mark.parametrize(
    ("text", "sizes", "words"),
    [
        ("{method: ngram, max_ngram: 1}", (1, 1), "the last 1 tokens"),
        ("{method: ngram, min_ngram: 6}", (6, 6), "the last 6 tokens"),
        ("{method: ngram, num_tokens: 1, lookup: false}", (2, 4), "1 token per request and step, drafted by"),
    ],
)
def test_what_is_not_written_follows_what_is(folder: Path, text: str, sizes: tuple[int, int], words: str) -> None:
    deployment = load(folder, text)
    speculation = deployment.config.instances[0].scheduler.speculation
    assert speculation is not None
    assert (speculation.min_ngram, speculation.max_ngram) == sizes
    assert words in words_of(speculation, deployment.header)


def test_modules_may_be_asked_only_where_nothing_recurs(folder: Path) -> None:
    deployment = load(folder, "{method: mtp, head: head, lookup: true, min_ngram: 3}")
    speculation = deployment.config.instances[0].scheduler.speculation
    assert speculation is not None
    assert (speculation.looks_up, speculation.min_ngram, speculation.max_ngram) == (True, 3, 4)
    assert "and first by what followed the last 4 to 3 tokens" in words_of(speculation, deployment.header)


def test_without_a_section_nothing_is_drafted(folder: Path) -> None:
    (folder / "deployment.yaml").write_text(PD)
    instances = load_deployment(folder / "deployment.yaml").config.instances
    assert [one.scheduler.speculation for one in instances] == [None, None]


def test_every_rank_is_told(folder: Path) -> None:
    deployment = load(folder, "{method: mtp, head: head}")
    placed = Running(deployment=deployment, hosts=Hosts.ONE).name_next(1).placed
    spec = bring_up.spec_of(deployment.config, placed.config, tp_rank=0, pp_rank=0)
    assert spec.speculation == SpeculationConfig(method=DraftMethod.MTP, head_path=(folder / "head").resolve())


def test_a_head_of_a_shipped_name_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"smollm2-135m-mtp": folder / "head"}
    monkeypatch.setattr("blockferry.cluster.speculation_settings.shipped_heads", lambda: shipped)
    speculation = load(folder, "{method: mtp, head: smollm2-135m-mtp}").config.instances[0].scheduler.speculation
    assert speculation is not None
    assert speculation.head_path == (folder / "head").resolve()


@pytest.mark.parametrize(
    ("model", "speculation", "num_layers"),
    [
        ({}, "{method: ngram}", 0),
        ({}, "{method: mtp, head: head}", 1),
        (OWN, "{method: mtp}", 1),
        (OWN, "{method: ngram}", 0),
    ],
)
def test_layers_that_draft_have_caches(folder: Path, model: dict[str, Any], speculation: str, num_layers: int) -> None:
    write_model(folder, model)
    made = plan(load(folder, speculation))
    assert len(made.model.draft_layer_ids) == num_layers
    assert len(made.model.layers) == 4 + num_layers


def test_states_of_drafts_have_blocks(folder: Path) -> None:
    write_model(folder, STATES)
    ledger = plan(load(folder, "{method: ngram, num_tokens: 2}")).ledger
    assert [group.spec.num_speculative_blocks for group in ledger.groups if group.spec.kind.value == "mamba"] == [2]


@pytest.mark.parametrize(
    ("speculation", "path", "words"),
    [
        ("{method: ngrams}", "method", "did you mean 'ngram'"),
        ("{num_tokens: 3}", "method", "is missing; write one of mtp, ngram"),
        ("{method: ngram, tokens: 3}", "tokens", "did you mean 'num_tokens'"),
        ("{method: ngram, num_tokens: 0}", "num_tokens", "between 1 and 8"),
        ("{method: ngram, num_tokens: 9}", "num_tokens", "between 1 and 8"),
        ("{method: ngram, adaptive: 1}", "adaptive", "true or false"),
        ("{method: ngram, head: head}", "head", "is of method mtp"),
        ("{method: ngram, lookup: true}", "lookup", "is of method mtp"),
        ("{method: ngram, min_ngram: 0}", "min_ngram", "at least 1|between 1"),
        ("{method: ngram, min_ngram: 2, max_ngram: 1}", "max_ngram", "1 is less than min_ngram=2; use 2 or more"),
        ("{method: ngram, num_tokens: x}", "num_tokens", "must be a whole number between 1 and 8, not"),
        ("{method: mtp, head: ''}", "head", "must not be empty"),
        ("{method: MTP}", "method", "did you mean 'mtp'"),
        ("{method: mtp, head: head, min_ngram: 2}", "min_ngram", "write lookup: true as well"),
        ("{method: mtp, head: head, lookup: 3}", "lookup", "must be true or false"),
        ("{method: mtp}", "method", "LlamaForCausalLM names no layers that predict several tokens"),
        ("{method: mtp, head: nowhere}", "head", "'nowhere' is neither a folder nor a shipped head"),
        ("{method: mtp, head: .}", "head", "has no config.json"),
    ],
)
def test_mistake_is_refused_with_path_and_remedy(folder: Path, speculation: str, path: str, words: str) -> None:
    message = refusal(folder, speculation)
    assert message.startswith(f"speculation.{path}: ")
    assert any(word in message for word in words.split("|")), message


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; a head folder says 'llama_mtp'"),
        ({"hidden_size": 64}, "hidden_size=64, the model has 72"),
        ({"base_num_hidden_layers": 30}, "base_num_hidden_layers=30, the model has 4"),
        ({"base_vocab_size": 49152}, "base_vocab_size=49152, the model has 256"),
        ({"num_key_value_heads": 9}, "num_key_value_heads=9, the model has 3"),
    ],
)
def test_a_head_of_another_model_is_refused(folder: Path, head: dict[str, Any], words: str) -> None:
    write_head(folder, head)
    message = refusal(folder, "{method: mtp, head: head}")
    assert message.startswith("speculation.head: ")
    assert words in message


@pytest.mark.parametrize(
    ("model", "words"), [(OWN, "the model is a DeepseekV3ForCausalLM"), (STATES, "the model is a Lfm2ForCausalLM")]
)
def test_a_head_is_refused_for_models_that_take_none(folder: Path, model: dict[str, Any], words: str) -> None:
    write_model(folder, model)
    assert words in refusal(folder, "{method: mtp, head: head}")


def test_an_encoder_decoder_drafts_by_ngrams_only(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(BART))
    assert "has no layers that predict several tokens" in refusal(folder, "{method: mtp}")
    assert load(folder, "{method: ngram}").config.instances[0].scheduler.speculation is not None


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("scheduler: {max_num_seqs: 2, max_num_batched_tokens: 4}", "max_num_batched_tokens=4 of instances[0]"),
        ("scheduler: {max_num_seqs: 2, max_num_batched_tokens: 4}", "use at most 3"),
    ],
)
def test_more_drafts_than_a_step_has_tokens_are_refused(folder: Path, rest: str, words: str) -> None:
    message = refusal(folder, "{method: ngram, num_tokens: 8}", rest)
    assert message.startswith("speculation.num_tokens: 8 drafts and a token are 9 tokens of a row")
    assert words in message


def refusal(folder: Path, speculation: str, rest: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, speculation, rest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def findings(folder: Path, speculation: str, rest: str = "") -> dict[str, tuple[Level, str]]:
    load(folder, speculation, f"api: {{port: 0}}\n{rest}")
    found = check_deployment(folder / "deployment.yaml", address=None)
    return {one.subject: (one.level, one.message) for one in found if one.subject.startswith("speculation")}


def test_check_says_who_drafts_what(folder: Path) -> None:
    (level, message) = findings(folder, "{method: ngram}")["speculation"]
    assert (level, message) == (
        Level.OK,
        "up to 3 tokens per request and step, drafted by what followed the last 4 to 2 tokens before (n-grams); "
        "fewer where they are not accepted",
    )


def test_check_looks_at_the_files_of_a_head(folder: Path) -> None:
    assert findings(folder, "{method: mtp, head: head}")["speculation.head"][0] is Level.OK
    (folder / "head" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert findings(folder, "{method: mtp, head: head}")["speculation.head"][0] is Level.ERROR


def test_check_warns_of_steps_too_short_for_every_draft(folder: Path) -> None:
    level, message = findings(folder, "{method: ngram, num_tokens: 8}")["speculation.num_tokens"]
    assert level is Level.WARNING
    assert "64 requests of instances[1] with 8 drafts each take 576 tokens of a step, which has 512" in message
