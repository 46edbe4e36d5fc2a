"""Which deployments `bench handoff` compares, and which pairs it refuses."""

import json

import pytest
from support.deployments import LLAMA

from blockferry.cluster.bench.handoff import AFTER, MIXED, OVERLAPPED, HandoffBenchConfig
from blockferry.cluster.bench.handoff_deployments import handoff_deployments, mixed_like
from blockferry.cluster.deployment import load_deployment
from blockferry.connectors.base import Overlap
from blockferry.engine.config import Role
from blockferry.engine.errors import ConfigError

APART = "instances: [{role: prefill}, {role: decode, num_threads: 4}]"
TOGETHER = "instances: [{role: mixed, num_threads: 2}]"


@pytest.fixture
def load(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))

    def load_text(instances, model="model: {path: model}"):
        file = tmp_path / "deployment.yaml"
        file.write_text(f"{model}\n{instances}\n")
        return load_deployment(file)

    return load_text


def test_all_run_beside_each_other_with_the_threads_of_the_mixed_one(load):
    made = handoff_deployments(load(APART), load(TOGETHER), num_prompt_tokens=100)
    assert list(made)[:2] == [MIXED, AFTER]
    configs = [one.config for one in made.values()]
    assert len({config.name for config in configs}) == len(configs)
    assert {config.api.port for config in configs} == {0}
    assert {instance.num_threads for config in configs for instance in config.instances} == {2}


def test_the_usual_baseline_is_one_mixed_instance_like_the_prefill_one(load):
    apart = load("instances: [{role: prefill, replicas: 2, num_threads: 3}, {role: decode}]")
    made = handoff_deployments(apart, mixed_like(apart), num_prompt_tokens=100)
    [instance] = made[MIXED].config.instances
    assert (instance.role, instance.replicas, instance.num_threads) == (Role.MIXED, 1, 3)


def test_overlap_is_measured_against_none_and_only_where_there_is_any(load):
    apart = load("connector: {overlap: chunks}\n" + APART)
    made = handoff_deployments(apart, load(TOGETHER), num_prompt_tokens=100)
    assert [made[name].config.connector.overlap for name in (AFTER, OVERLAPPED)] == [Overlap.NONE, Overlap.CHUNKS]
    plain = load("connector: {overlap: none}\n" + APART)
    assert list(handoff_deployments(plain, load(TOGETHER), num_prompt_tokens=100)) == [MIXED, AFTER]


@pytest.mark.parametrize(
    ("apart", "mixed", "words"),
    [
        ((TOGETHER,), (TOGETHER,), "--config: 'deployment' has no prefill and decode instances"),
        ((APART,), (APART,), "--baseline: 'deployment' has prefill and decode instances"),
        (
            (APART, "model: {path: model, dtype: float32}"),
            (TOGETHER, "model: {path: model, dtype: bfloat16}"),
            "--baseline: model.dtype is bfloat16 there and float32 in --config",
        ),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(load, apart, mixed, words):
    with pytest.raises(ConfigError, match=words):
        handoff_deployments(load(*apart), load(*mixed), num_prompt_tokens=100)


def test_a_prompt_beyond_the_models_length_is_refused(load):
    with pytest.raises(ConfigError, match="--prompt-tokens: 2047 and 4 to generate exceed max_model_len=2048"):
        handoff_deployments(load(APART), load(TOGETHER), num_prompt_tokens=2047)


@pytest.mark.parametrize("options", [{"prompt_tokens": 0}, {"num_runs": 0}, {"num_warmup": -1}])
def test_absurd_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        HandoffBenchConfig(**options)
