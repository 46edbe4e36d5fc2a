"""Models, health, version, tokenizing, metrics, and what a checkpoint folder tells the server."""

import json

import pytest
from support import tiny_tokenizers
from support.api_client import ApiClient, refusal
from support.tiny_engine import TinyEngine, text_reply

from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.engine.config import DType, ModelConfig
from blockferry.engine.errors import ModelLoadError


async def test_the_model_is_listed_with_its_context():
    body = (await ApiClient().get("/v1/models")).json()
    assert [(card["id"], card["max_model_len"]) for card in body["data"]] == [("tiny", 256)]
    assert (await ApiClient().get("/v1/models/tiny")).json()["object"] == "model"


async def test_health_follows_the_engine():
    client = ApiClient()
    assert (await client.get("/health")).status_code == 200
    client.engine.is_reachable = False
    assert refusal(await client.get("/health"))[0] == 503


async def test_version_is_told():
    assert set((await ApiClient().get("/version")).json()) == {"version"}


async def test_tokenize_and_detokenize_round_trip():
    client = ApiClient()
    text = "naïve 你好 😀<|im_end|>"
    tokens = (await client.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 256
    assert (await client.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": text}


async def test_messages_can_be_tokenized():
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await ApiClient().post("/tokenize", body)).json()["tokens"]
    assert tiny_tokenizers.byte_level().decode(tokens, skip_special_tokens=False).endswith("assistant\n")


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
async def test_tokenize_wants_one_of_prompt_and_messages(body):
    assert refusal(await ApiClient().post("/tokenize", body))[0] == 400


async def test_detokenize_refuses_ids_outside_the_vocabulary():
    status, error = refusal(await ApiClient().post("/detokenize", {"tokens": [5, 400]}))
    assert (status, error["param"]) == (400, "tokens.1")


async def test_a_model_without_a_template_says_so():
    tokenizer = tiny_tokenizers.byte_fallback()
    client = ApiClient(tokenizer=tokenizer, vocab_size=tokenizer.num_tokens)
    status, error = await client.error("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert (status, error["code"]) == (400, "no_chat_template")


async def test_a_template_s_complaint_reaches_the_client():
    template = "{{ raise_exception('roles must alternate') }}"
    backend = tiny_tokenizers.byte_level()._backend
    client = ApiClient(tokenizer=Tokenizer(backend, {}, template))
    status, error = await client.error("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert status == 400
    assert "roles must alternate" in error["message"]


def _series(text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_metrics_count_requests_tokens_and_times():
    client = ApiClient()
    await client.complete(prompt=[5, 6, 7], max_tokens=5)
    series = _series((await client.get("/metrics")).text)
    label = '{model_name="tiny"}'
    assert series[f"blockferry:prompt_tokens_total{label}"] == 3
    assert series[f"blockferry:generation_tokens_total{label}"] == 5
    assert series[f"blockferry:time_to_first_token_seconds_count{label}"] == 1
    assert series[f"blockferry:inter_token_latency_seconds_count{label}"] == 4
    assert series[f"blockferry:e2e_request_latency_seconds_count{label}"] == 1
    assert series[f"blockferry:request_queue_time_seconds_sum{label}"] == 0.001
    assert series[f"blockferry:kv_transfer_bytes_sum{label}"] == 4096
    assert series[f"blockferry:kv_transfer_saved_bytes_sum{label}"] == 0
    assert series['blockferry:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    engine = '{engine="mixed0",model_name="tiny",role="mixed"}'
    assert series[f"blockferry:kv_cache_usage_perc{engine}"] == 0.25
    assert series[f"blockferry:prefix_cache_hits_total{engine}"] == 40
    assert series[f"blockferry:prefix_cache_hit_rate{label}"] == 0.4


async def test_metrics_survive_a_silent_engine():
    client = ApiClient(TinyEngine())
    client.engine.is_reachable = False
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert "blockferry:num_requests_running{" not in response.text


def _folder(tmp_path, **files):
    tiny_tokenizers.byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    contents = {
        "config": {"vocab_size": 512, "eos_token_id": 0},
        "generation_config": {"eos_token_id": [2, 7], "temperature": 0.7, "do_sample": True},
        "tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"},
    }
    for name, content in (contents | files).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return ModelConfig(name="x", served_name="y", path=tmp_path, dtype=DType.FLOAT32, max_model_len=64)


def test_a_checkpoint_folder_tells_vocabulary_eos_and_defaults(tmp_path):
    model = ServedModel.load(_folder(tmp_path))
    assert (model.vocab_size, model.eos_token_ids) == (512, (0, 2, 7))
    assert model.default_sampling == {"temperature": 0.7}
    assert model.tokenizer.chat_template is not None


def test_the_jinja_file_wins_over_the_tokenizer_config(tmp_path):
    config = _folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}from file {{ eos_token }}")
    template = ServedModel.load(config).tokenizer.chat_template
    assert template.render([], add_generation_prompt=True, variables={}) == "from file <|im_end|>"


def test_a_corrupt_tokenizer_is_one_clear_error(tmp_path):
    config = _folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelLoadError, match=r"tokenizer in .* cannot be loaded"):
        ServedModel.load(config)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


async def test_metrics_count_what_a_request_that_met_a_stop_string_cost():
    client = ApiClient(TinyEngine(text_reply("one two STOP three")))
    await client.complete(prompt=[5, 6, 7], max_tokens=50, stop="STOP")
    series = _series((await client.get("/metrics")).text)
    assert series['blockferry:request_queue_time_seconds_count{model_name="tiny"}'] == 1
