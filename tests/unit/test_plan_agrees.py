"""`blockferry plan` shows what a deployment's instances run on: the same groups, blocks and capacity in any family."""

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_families import FAMILIES

from blockferry.cluster import cli, cli_output
from blockferry.cluster.check import Level, check_deployment
from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.plan_facts import PlanFacts, facts_of_instance
from blockferry.cluster.scheduler_host import InstanceSettings, SchedulerSettings
from blockferry.cluster.shipped import shipped_models
from blockferry.engine.config import CacheConfig, Role, SchedulerConfig
from blockferry.engine.kv.instance_plan import InstancePlan

TEXT_MODELS = {  # what a deployment can serve of a checkpoint that also sees
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
MODELS = [*FAMILIES, *shipped_models()]
MEMORY = {name: "2MiB" if name in FAMILIES else "20GiB" for name in MODELS}
LENGTH = 256

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call a command with --json in this process; its document. main() replaces signal handlers: they are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run_main(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["blockferry", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert ended.value.code == 0, shown.err
        return json.loads(shown.out)

    yield run_main
    for number, handler in before.items():
        signal.signal(number, handler)


@functools.cache
def config_of(name: str) -> dict[str, Any]:
    """The config.json of a tiny family or a shipped model."""
    if name in FAMILIES:
        family = FAMILIES[name]
        return json.loads(family.make_config().to_json_string()) | {"architectures": [family.architecture]}
    values = json.loads(shipped_models()[name].read_text())
    architecture = values["architectures"][0]
    return values | {"architectures": [TEXT_MODELS.get(architecture, architecture)]}


def write(
    folder: Path, name: str, *, dtype: str = "float32", speculation: dict[str, Any] | None = None, **instance: Any
) -> Path:
    """A deployment of one instance; its planner and cache dtype, say, are keys of `instance`."""
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_steps_in_flight": 2}
    cache = {"memory": MEMORY[name], **instance.pop("cache", {})}
    file = folder / "deployment.yaml"
    file.write_text(
        json.dumps(  # which is YAML, too
            {
                "name": f"agrees-{os.getpid()}",
                "model": {"path": str(folder), "dtype": dtype, "max_model_len": LENGTH},
                "api": {"port": 0},
                "speculation": speculation,
                "instances": [{"role": "mixed", "cache": cache, "scheduler": scheduler, **instance}],
            }
        )
    )
    return file


def planned(file: Path) -> InstancePlan:
    deployment = load_deployment(file)
    instance = deployment.config.instances[0]
    assert instance.scheduler.max_in_flight_tokens == 128
    return plan_of(deployment.config.model, deployment.header, instance, where="instances[0]")


def reported(file: Path) -> PlanFacts:
    return facts_of_instance(planned(file))


def arguments(folder: Path, name: str, facts: PlanFacts, *options: str) -> list[str]:
    limits = ["--max-model-len", str(facts.max_model_len), "--max-num-batched-tokens", "128"]
    return ["plan", str(folder), "--memory", MEMORY[name], *limits, *options]


def shared(document: dict[str, Any]) -> dict[str, Any]:
    """What of a plan's document a deployment reports."""
    group_keys = ("type", "layers", "block_size", "page_size_bytes")
    keys = [key for key in document if key in PlanFacts.__dataclass_fields__]
    return {key: document[key] for key in keys} | {
        "groups": [{key: group[key] for key in group_keys} for group in document["groups"]]
    }


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("planner", ["auto", "uniform", "slab"])
@pytest.mark.parametrize("name", MODELS)
def test_plan_shows_what_an_instance_runs_on(name: str, planner: str, tp_size: int, tmp_path: Path, run: Run) -> None:
    facts = reported(write(tmp_path, name, cache={"planner": planner}, tensor_parallel=tp_size))

    chosen = [] if planner == "auto" else ["--planner", planner]
    document = run(*arguments(tmp_path, name, facts, "--dtype", "float32", "--tp", str(tp_size), *chosen))

    assert shared(document) == facts.to_json()


@pytest.mark.parametrize("name", [name for name in MODELS if not config_of(name).get("is_encoder_decoder")])
def test_plan_shows_what_an_instance_with_an_fp8_cache_runs_on(name: str, tmp_path: Path, run: Run) -> None:
    facts = reported(write(tmp_path, name, dtype="bfloat16", cache={"dtype": "fp8"}))

    document = run(*arguments(tmp_path, name, facts, "--dtype", "bfloat16", "--kv-dtype", "fp8"))

    assert shared(document) == facts.to_json()


@pytest.mark.parametrize("name", MODELS)
def test_plan_shows_the_fullest_stage_of_a_pipeline(name: str, tmp_path: Path, run: Run) -> None:
    facts = reported(write(tmp_path, name, cache={"planner": "uniform"}, pipeline_parallel=3))

    document = run(*arguments(tmp_path, name, facts, "--dtype", "float32", "--pp", "3", "--planner", "uniform"))

    assert facts.stage is not None
    assert shared(document) == facts.to_json()


@pytest.mark.parametrize("name", [name for name in MODELS if not config_of(name).get("is_encoder_decoder")])
def test_plan_shows_what_an_instance_that_drafts_by_ngrams_runs_on(name: str, tmp_path: Path, run: Run) -> None:
    facts = reported(write(tmp_path, name, speculation={"method": "ngram", "num_tokens": 2}))

    drafting = ["--speculative-tokens", "2", "--draft-layers", "0"]
    document = run(*arguments(tmp_path, name, facts, "--dtype", "float32", *drafting))

    assert shared(document) == facts.to_json()


@pytest.mark.parametrize(
    ("name", "layers"),
    [("deepseek-v3", []), ("qwen3-next-80b", ["--draft-layers", "1"]), ("llama", ["--draft-layers", "1"])],
)
def test_plan_shows_what_an_instance_with_layers_that_draft_runs_on(
    name: str, layers: list[str], tmp_path: Path, run: Run
) -> None:
    speculation = {"method": "mtp", "num_tokens": 2}
    if name in FAMILIES:
        speculation["head"] = write_head(tmp_path / "head", config_of(name))
    facts = reported(write(tmp_path, name, speculation=speculation))

    document = run(*arguments(tmp_path, name, facts, "--dtype", "float32", "--speculative-tokens", "2", *layers))

    assert shared(document) == facts.to_json()
    assert (
        max(number for group in facts.groups for number in group.layer_numbers) == config_of(name)["num_hidden_layers"]
    )


def write_head(folder: Path, base: dict[str, Any]) -> str:
    folder.mkdir()
    values = {"model_type": "llama_mtp", "num_nextn_predict_layers": 1, "hidden_size": base["hidden_size"]}
    values |= {f"base_{key}": base[key] for key in ("num_hidden_layers", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_plan_of_a_pool_too_small_for_the_length_is_that_of_the_length_that_fits(tmp_path: Path, run: Run) -> None:
    file = write(tmp_path, "llama", cache={"memory": "256KiB"})
    facts = reported(file)

    document = run(
        *[word.replace("2MiB", "256KiB") for word in arguments(tmp_path, "llama", facts, "--dtype", "float32")]
    )

    assert facts.max_model_len < LENGTH
    assert shared(document) == facts.to_json()


def test_check_tells_each_instances_plan(tmp_path: Path) -> None:
    file = write(tmp_path, "gemma3_text")

    (finding,) = [one for one in check_deployment(file, address=None) if one.subject == "instances[0].cache"]

    assert finding.level is Level.OK
    assert finding.to_json()["plan"] == reported(file).to_json()


def settings(plan: InstancePlan) -> SchedulerSettings:
    members = tuple(
        InstanceSettings(
            instance_id=name,
            role=Role.MIXED,
            num_ranks=1,
            kv=plan.ledger,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(),
            plan=facts_of_instance(plan),
        )
        for name in ("mixed-0", "mixed-1")
    )
    return SchedulerSettings(
        deployment="d", model="m", max_model_len=LENGTH, instances=members, connector=None, has_remote_ranks=False
    )


SNAPSHOT = {
    "healthy": True,
    "uptime_s": 1.0,
    "url": "",
    "num_unfinished": 0,
    "transfers": {"num_done": 0, "num_bytes": 0, "num_failed": 0},
    "handoffs": {},
    "prefix_cache": {"num_queried_tokens": 0, "num_hit_tokens": 0, "hit_rate": 0.0},
    "instances": [
        dict.fromkeys(("num_ranks", "num_running", "num_waiting", "num_free_blocks", "num_blocks"), 1)
        | {"instance_id": name, "role": "mixed", "state": "up", "num_preemptions": 0}
        for name in ("mixed-0", "mixed-1")
    ],
}


def test_status_tells_each_instances_plan(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, "gemma3_text"))

    status = settings(plan).status(SNAPSHOT)

    assert [one["plan"] for one in status["instances"]] == [facts_of_instance(plan).to_json()] * 2
    assert json.loads(json.dumps(status)) == status


def test_status_names_instances_of_one_plan_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(write(tmp_path, "gemma3_text", cache={"planner": "slab"}))

    cli_output.print_status([settings(plan).status(SNAPSHOT)])

    shown = capsys.readouterr().out
    assert "mixed-0, mixed-1: slab plan of 2 group(s)" in shown
    assert "sliding_window: layers 0-4, blocks of 16 tokens" in shown
