"""The shipped cluster files: Ray's own schema, KubeRay's types, and what each of them must say."""

import copy
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from support.deployments import LLAMA

from blockferry.cluster.deployment import load_deployment
from blockferry.engine.config import Role

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "ray"
RAY_UP = ("local", "aws", "gcp")
CLOUDS = ("aws", "gcp")
KUBERAY = ("kuberay-raycluster", "kuberay-rayjob")
SCHEMA = yaml.safe_load((ROOT / "tests" / "data" / "kuberay.schema.yaml").read_text())


def llama(folder: Path) -> Callable[..., Path]:
    """A checkpoint without weights, in place of the one that a file names."""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 8192}))
    return lambda *_names, **_options: folder


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return document


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Documents of a Kubernetes file by kind."""
    documents = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def cluster_spec(name: str) -> dict[str, Any]:
    found = manifests(name)
    spec: dict[str, Any] = (
        found["RayCluster"]["spec"] if "RayCluster" in found else found["RayJob"]["spec"]["rayClusterSpec"]
    )
    return spec


def groups(name: str) -> list[dict[str, Any]]:
    spec = cluster_spec(name)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_every_file_is_looked_at_here() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*RAY_UP, *KUBERAY}


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_the_file(name: str) -> None:
    validate_config(prepare_config(load(name)))


def test_rays_schema_would_notice_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(load("aws") | {"worker_nodess": {}}))


@pytest.mark.parametrize("name", RAY_UP)
def test_every_host_is_started_with_token_authentication_and_gets_the_token(name: str) -> None:
    config = load(name)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        [start] = [command for command in commands if "ray start" in command]
        assert "RAY_AUTH_MODE=token" in start
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", RAY_UP)
def test_every_host_installs_the_package(name: str) -> None:
    config = load(name)
    assert config["file_mounts"]["~/blockferry"] == "."
    assert any("pip install" in command and "~/blockferry" in command for command in config["setup_commands"])


@pytest.mark.parametrize("name", CLOUDS)
def test_the_head_of_a_cloud_runs_no_worker(name: str) -> None:
    config = prepare_config(load(name))
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    assert any(
        "ray start --head" in command and "--num-cpus=0" in command for command in config["head_start_ray_commands"]
    )


@pytest.mark.parametrize("name", CLOUDS)
def test_hosts_that_come_up_hold_the_shipped_cpu_deployment_one_worker_each(name: str, tmp_path: Path) -> None:
    deployment = load_deployment(ROOT / "configs" / "smollm2-pd-cpu.yaml", resolve=llama(tmp_path))
    wanted = [instance.num_cpus for instance in deployment.config.instances]
    types = prepare_config(load(name))["available_node_types"].values()
    offered = [kind["resources"]["CPU"] for kind in types for _ in range(kind["min_workers"])]
    assert offered == wanted == [1, 1]


@pytest.mark.parametrize("name", CLOUDS)
def test_gpu_hosts_cost_nothing_until_somebody_asks(name: str) -> None:
    types = prepare_config(load(name))["available_node_types"].values()
    with_gpus = [kind for kind in types if kind["resources"].get("GPU")]
    assert len(with_gpus) == 2
    assert [kind["min_workers"] for kind in with_gpus] == [0, 0]


def test_no_port_of_aws_is_opened_but_ray_s_own_two_rules() -> None:
    group = load("aws")["provider"]["security_group"]
    assert "IpPermissions" not in group  # Ray adds SSH, and everything between members


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_accepts_the_file(name: str) -> None:
    found = manifests(name)
    jsonschema.validate(found.get("RayCluster") or found["RayJob"], SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroup"), {}),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "authOptions", "mode"), "on"),
        (("spec", "headGroupSpec", "template", "spec", "containers"), []),
    ],
)
def test_the_kuberay_schema_would_notice(path: tuple[str, ...], value: object) -> None:
    document = copy.deepcopy(manifests("kuberay-raycluster")["RayCluster"])
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("name", KUBERAY)
def test_kubernetes_pods_run_the_pinned_ray_with_a_token(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["rayVersion"] == importlib.metadata.version("ray")
    assert spec["authOptions"] == {"mode": "token"}


def test_the_job_server_that_the_docs_install_is_of_the_pinned_ray() -> None:
    assert f"'ray[default]=={importlib.metadata.version('ray')}'" in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize("name", KUBERAY)
def test_pods_with_workers_have_more_shared_memory_than_pools_and_ray_s_store(name: str) -> None:
    pool_mib = 512  # cache.memory of the deployment
    for group in groups(name)[1:]:
        if group["rayStartParams"].get("num-cpus") == "0":
            continue
        spec = group["template"]["spec"]
        [shm] = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert (
            int(shm["sizeLimit"].removesuffix("Gi")) * 1024
            > pool_mib + int(group["rayStartParams"]["object-store-memory"]) / 2**20
        )
        assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("name", KUBERAY)
def test_volumes_that_are_mounted_exist(name: str) -> None:
    for group in groups(name):
        spec = group["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize("name", KUBERAY)
def test_only_the_http_server_and_the_dashboard_can_be_reached_from_other_pods(name: str) -> None:
    found = manifests(name)
    spec = found["NetworkPolicy"]["spec"]
    own, other = spec["ingress"]
    assert own == {"from": [{"podSelector": spec["podSelector"]}]}
    assert [rule["port"] for rule in other["ports"]] == [8000, 8265]
    labels = spec["podSelector"]["matchLabels"].items()
    assert all(labels <= group["template"]["metadata"]["labels"].items() for group in groups(name))


@pytest.mark.parametrize("name", KUBERAY)
def test_the_service_finds_the_pod_that_serves(name: str) -> None:
    selector = manifests(name)["Service"]["spec"]["selector"].items()
    chosen = [group for group in groups(name) if selector <= group["template"]["metadata"]["labels"].items()]
    [serving] = chosen
    mounts = [mount for container in serving["template"]["spec"]["containers"] for mount in container["volumeMounts"]]
    assert {"name": "deployment", "mountPath": "/etc/blockferry"} in mounts


@pytest.mark.parametrize("name", KUBERAY)
def test_the_deployment_in_the_file_is_valid_and_fits_the_pods(name: str, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(manifests(name)["ConfigMap"]["data"]["deployment.yaml"])
    config = load_deployment(file, resolve=llama(tmp_path)).config
    assert [instance.role for instance in config.instances] == [Role.PREFILL, Role.DECODE]
    assert config.api.host == "0.0.0.0"
    cpus = sum(
        group["replicas"] * int(group["rayStartParams"].get("num-cpus", 0))
        for group in cluster_spec(name)["workerGroupSpecs"]
    )
    assert cpus == 2


def test_the_driver_beside_ray_shares_what_ray_asks_of_one() -> None:
    """Files of its session, shared memory, and process numbers: raylet and driver look at each other's."""
    [front] = [group for group in groups("kuberay-raycluster") if group.get("groupName") == "front"]
    spec = front["template"]["spec"]
    ray, serve = spec["containers"]
    assert spec["shareProcessNamespace"] is True
    assert ray["image"] == serve["image"]
    shared = [{mount["mountPath"] for mount in one["volumeMounts"]} for one in (ray, serve)]
    assert {"/tmp/ray", "/dev/shm"} <= shared[0] & shared[1]
