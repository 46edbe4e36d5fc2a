"""Which layers draft for a model, and what a head folder is refused for."""

import json
from pathlib import Path

import pytest
from support.deployments import LLAMA

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import ModelHeader, read_header
from blockferry.engine.models.draft_head import num_drafting_layers

DENSE = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
HEAD = {
    "model_type": "llama_mtp",
    "num_nextn_predict_layers": 1,
    "hidden_size": LLAMA["hidden_size"],
    "base_num_hidden_layers": LLAMA["num_hidden_layers"],
    "base_vocab_size": LLAMA["vocab_size"],
}


def header_of(folder: Path, values: dict[str, object]) -> ModelHeader:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return read_header(folder)


def mtp(num_tokens: int = 3, head: Path | None = None) -> SpeculationConfig:
    return SpeculationConfig(method=DraftMethod.MTP, num_tokens=num_tokens, head_path=head)


def head_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**HEAD, **changes}))
    return folder


def test_nobody_drafts_without_speculation_or_from_ngrams(tmp_path: Path) -> None:
    header = header_of(tmp_path, DENSE)
    assert num_drafting_layers(header, None) == 0
    assert num_drafting_layers(header, SpeculationConfig(method=DraftMethod.NGRAM)) == 0


def test_a_head_folder_drafts_for_the_model_it_was_trained_for(tmp_path: Path) -> None:
    header, head = header_of(tmp_path / "model", DENSE), head_folder(tmp_path / "head")
    assert num_drafting_layers(header, mtp(head=head)) == 1


def test_more_layers_than_drafted_tokens_are_not_taken(tmp_path: Path) -> None:
    header, head = header_of(tmp_path / "model", DENSE), head_folder(tmp_path / "head", num_nextn_predict_layers=4)
    assert num_drafting_layers(header, mtp(2, head)) == 2


def test_a_family_with_draft_layers_counts_them_by_its_config(tmp_path: Path) -> None:
    values = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 2}
    assert num_drafting_layers(header_of(tmp_path, values), mtp()) == 2


def test_qwen3_next_has_one_where_its_config_is_silent(tmp_path: Path) -> None:
    values = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"]}
    assert num_drafting_layers(header_of(tmp_path, values), mtp()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 96}, "hidden_size=96, the model has"),
        ({"base_num_hidden_layers": 31}, "base_num_hidden_layers=31, the model has"),
        ({"base_vocab_size": 7}, "base_vocab_size=7, the model has"),
        ({"intermediate_size": 7}, "intermediate_size=7, the model has"),
        ({"rope_theta": 5.0}, "rope_theta=5.0, the model has"),
        ({"model_type": "llama"}, "a head folder says 'llama_mtp'"),
        ({"base_vocab_size": None}, "base_vocab_size is missing"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
    ],
)
def test_a_head_of_another_model_is_refused_in_one_line(tmp_path: Path, changes, words: str) -> None:
    header, head = header_of(tmp_path / "model", DENSE), head_folder(tmp_path / "head", **changes)
    with pytest.raises(ModelLoadError, match=words) as refused:
        num_drafting_layers(header, mtp(head=head))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_a_family_without_draft_layers_is_told_the_remedy(tmp_path: Path, architecture: str) -> None:
    header = header_of(tmp_path, {**LLAMA, "architectures": [architecture]})
    with pytest.raises(ModelLoadError, match=r"no layers that predict several tokens.*use method ngram"):
        num_drafting_layers(header, mtp())


def test_a_head_for_another_family_is_refused(tmp_path: Path) -> None:
    header = header_of(tmp_path / "model", {**LLAMA, "architectures": ["Qwen3NextForCausalLM"]})
    with pytest.raises(ModelLoadError, match="the model is a Qwen3NextForCausalLM"):
        num_drafting_layers(header, mtp(head=head_folder(tmp_path / "head")))
