"""Where the scales of an fp8 cache come from, what a plan makes of it, and what peers refuse."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.deployments import LLAMA, PD
from support.local_engine import EngineOptions, start_worker
from support.tiny_families import FAMILIES, build

from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.plan_model import PlanQuestion, plan_model
from blockferry.connectors.base import HandshakeRefused, PoolEndpoint, PoolLayout
from blockferry.connectors.handshake import check_compatible, decode_endpoint, encode_endpoint, with_common_scales
from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.kv.instance_plan import InstanceRequest, plan_instance
from blockferry.engine.kv.model_layers import CacheDType, LayerOptions
from blockferry.engine.kv.plan import Planner
from blockferry.engine.models.config import read_header
from blockferry.engine.worker.calibration import calibration_plan, calibration_steps, scales_of
from blockferry.kernels.fp8 import CacheScales

FP8 = EngineOptions(cache_dtype=CacheDType.FP8, max_model_len=128)
REQUEST = InstanceRequest(
    dtype="bfloat16", max_model_len=1024, max_in_flight_tokens=512, memory_bytes=1 << 24, planner=Planner.UNIFORM
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILIES["llama"], tmp_path_factory.mktemp("fp8"))


def scales(*values: float) -> CacheScales:
    return CacheScales(k_K=torch.tensor(values), v_K=torch.tensor(values))


def floats(layout: PoolLayout) -> list[float]:
    return np.frombuffer(layout.scales, "<f4").tolist()


def test_scales_are_powers_of_two_that_leave_twice_the_range() -> None:
    found = scales_of({0: scales(224.0, 225.0, 0.0)})[0].k_K
    assert found.tolist() == [1.0, 2.0, 1.0]


def test_keys_that_are_not_finite_have_no_scale() -> None:
    with pytest.raises(ModelLoadError, match="not finite"):
        scales_of({3: scales(float("inf"))})


def test_two_workers_calibrate_alike_whatever_their_budget(llama: Path) -> None:
    first = start_worker(llama, FP8).layouts()
    second = start_worker(llama, dataclasses.replace(FP8, max_num_batched_tokens=96, block_size=32)).layouts()
    assert first[0].scales == second[0].scales
    assert all(value > 0 for value in floats(first[0]))
    assert len(floats(first[0])) == 4 * 2 * 2  # layers, heads, k and v


def test_scales_of_the_checkpoint_are_taken_as_they_are(llama: Path, tmp_path: Path) -> None:
    folder = with_scales(llama, tmp_path, {"k_scale": torch.tensor(0.3), "v_scale": torch.tensor([0.1, 0.7])})
    (layout,) = start_worker(folder, FP8).layouts()
    assert floats(layout) == pytest.approx([0.3, 0.1, 0.3, 0.7] * 4)


def test_scales_of_the_checkpoint_must_be_positive(llama: Path, tmp_path: Path) -> None:
    folder = with_scales(llama, tmp_path, {"k_scale": torch.tensor(0.3), "v_scale": torch.tensor(0.0)})
    with pytest.raises(ModelLoadError, match="v_scale holds scales that are not positive"):
        start_worker(folder, FP8)


def with_scales(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint of four layers whose attention brings these tensors."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    named = {f"model.layers.{i}.self_attn.{name}": value.clone() for i in range(4) for name, value in tensors.items()}
    save_file(load_file(source / "model.safetensors") | named, target / "model.safetensors")
    return target


def test_peers_read_the_pool_as_float8_e4m3fn(llama: Path) -> None:
    (layout,) = start_worker(llama, FP8).layouts()
    assert (layout.dtype, layout.content_bytes) == ("float8_e4m3fn", 2 * 16)


def test_fp8_halves_blocks_against_bfloat16_and_doubles_their_number() -> None:
    whole = plan_instance(LLAMA, REQUEST)
    fp8 = plan_instance(LLAMA, dataclasses.replace(REQUEST, cache_dtype=CacheDType.FP8))
    assert 2 * fp8.stages[0].bytes_per_block == whole.stages[0].bytes_per_block
    assert fp8.ledger.num_blocks in {2 * whole.ledger.num_blocks, 2 * whole.ledger.num_blocks + 1}


def test_states_stay_in_the_type_of_the_model(tmp_path: Path) -> None:
    config = json.loads((build(FAMILIES["jamba"], tmp_path) / "config.json").read_text())
    plans = [
        plan_instance(config, dataclasses.replace(REQUEST, cache_dtype=dtype, block_size=16, planner=Planner.SLAB))
        for dtype in (CacheDType.AUTO, CacheDType.FP8)
    ]
    states = [[spec for spec in plan.model.layers if hasattr(spec, "shapes")] for plan in plans]
    assert states[0] == states[1] != []


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_calibration_has_a_block_for_every_state_that_it_computes(num_drafts: int, tmp_path: Path) -> None:
    path = build(FAMILIES["qwen3_next"], tmp_path)
    speculation = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=num_drafts) if num_drafts else None
    spec = dataclasses.replace(FP8, speculation=speculation).worker_spec(path)
    plan = calibration_plan(spec, read_header(path))
    first, *_ = calibration_steps(spec, plan, read_header(path))
    assert plan.ledger.slab is None
    assert sorted(first.deltas.block_id.tolist()) == list(range(1, plan.ledger.num_blocks))


def test_plan_command_and_instance_agree(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "deployment.yaml").write_text(PD + "cache: {dtype: fp8, memory: 16MiB, planner: uniform}\n")
    deployment = load_deployment(tmp_path / "deployment.yaml")
    instance = deployment.config.instances[0]
    running = plan_of(deployment.config.model, deployment.header, instance, where="instances[0]")
    question = PlanQuestion(
        memory_bytes=16 << 20, layers=LayerOptions(cache_dtype=CacheDType.FP8), max_model_len=2048, layout="BHLNC"
    )
    (asked,) = plan_model(LLAMA, question, [Planner.UNIFORM])
    assert asked.plan.num_blocks == running.ledger.num_blocks
    assert asked.plan.bytes_per_block == running.stages[0].bytes_per_block


def test_an_unknown_cache_type_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(PD + "cache: {dtype: int8}\n")
    with pytest.raises(ConfigError, match=r"cache\.dtype"):
        load_deployment(tmp_path / "deployment.yaml")


def test_cross_attention_is_not_planned_in_fp8(tmp_path: Path) -> None:
    config = json.loads((build(FAMILIES["bart"], tmp_path) / "config.json").read_text())
    with pytest.raises(ConfigError, match="cross attention"):
        plan_instance(config, dataclasses.replace(REQUEST, cache_dtype=CacheDType.FP8))


def make_endpoint(instance_id: str, **changes: object) -> PoolEndpoint:
    layout = PoolLayout(
        order="BHLNC",
        num_blocks=8,
        block_size=16,
        layer_ids=(0, 1),
        head_start=0,
        num_heads=2,
        content_bytes=128,
        dtype="float8_e4m3fn",
        scales=np.arange(1, 9, dtype="<f4").tobytes(),
    )
    return PoolEndpoint(
        instance_id=instance_id,
        tp_rank=0,
        pp_rank=0,
        model_fingerprint="m1",
        layouts=(dataclasses.replace(layout, **changes),),
        transport="ucx",
        host_id="h",
        address=b"a",
        region=b"r",
    )


def test_scales_survive_the_wire() -> None:
    endpoint = make_endpoint("p0")
    assert decode_endpoint(encode_endpoint(endpoint)) == endpoint


def test_other_scales_are_refused_with_layer_and_head() -> None:
    other = np.array([1, 2, 3, 4, 5, 6, 7, 9], "<f4").tobytes()
    with pytest.raises(HandshakeRefused, match=r"scales of layer 1, KV head 1=\(7\.0, 9\.0\).*\(7\.0, 8\.0\)"):
        check_compatible(make_endpoint("p0"), make_endpoint("d0", scales=other))


def test_ranks_agree_on_the_largest_scale_of_each_layer_and_head() -> None:
    own = make_endpoint("p0", scales=np.array([1, 2, 4, 4, 1, 1, 1, 1], "<f4").tobytes())
    upper = make_endpoint("d0", head_start=1, num_heads=1, scales=np.array([2, 8, 1, 2], "<f4").tobytes())
    lower = make_endpoint("d0", head_start=0, num_heads=1, scales=np.array([1, 2, 2, 1], "<f4").tobytes())
    agreed = [decode_endpoint(one) for one in with_common_scales([encode_endpoint(one) for one in (own, upper, lower)])]
    assert [floats(one.layouts[0]) for one in agreed] == [[1, 2, 4, 8, 2, 1, 1, 2], [4, 8, 1, 2], [1, 2, 2, 1]]
    for peer in agreed[1:]:
        check_compatible(agreed[0], peer)


def test_endpoints_of_equal_scales_stay_as_they_are() -> None:
    endpoints = [encode_endpoint(make_endpoint(name)) for name in ("p0", "d0")]
    assert with_common_scales(endpoints) == endpoints


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_worker_takes_the_scales_that_were_agreed_upon(family: str, tmp_path: Path) -> None:
    worker = start_worker(build(FAMILIES[family], tmp_path), FP8)
    own = worker.layouts()
    doubled = [dataclasses.replace(one, scales=(2 * np.frombuffer(one.scales, "<f4")).tobytes()) for one in own]
    worker.take_scales(doubled)
    assert worker.layouts() == tuple(doubled)


def test_another_cache_type_is_refused_by_name() -> None:
    with pytest.raises(HandshakeRefused, match=r"dtype='bfloat16'.*'float8_e4m3fn'"):
        check_compatible(make_endpoint("p0"), make_endpoint("d0", dtype="bfloat16", scales=b"", content_bytes=256))


def test_ranks_with_some_of_the_heads_compare_those() -> None:
    upper = np.array([3, 4, 7, 8], "<f4").tobytes()
    check_compatible(make_endpoint("p0"), make_endpoint("d0", head_start=1, num_heads=1, scales=upper))
