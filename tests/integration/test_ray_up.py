"""`ray up` on three hosts: prefill on one, decode on another, blocks between them over UCX TCP, nothing left.

And `bench transfer` between two of them, asked for on the third.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster import MODEL, smollm2_dir
from support.netns_hosts import LAUNCHER, Host, NetnsHosts, missing_tools, python_folders

from blockferry.engine.config import cache_dir

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DEPLOYMENT = f"""
name: three-hosts
model: {{name: {MODEL}, dtype: float32, max_model_len: 2048}}
cache: {{num_blocks: 300}}
instances:
  - {{role: prefill, resources: {{num_cpus: 1}}}}
  - {{role: decode, resources: {{num_cpus: 1}}}}
api: {{port: 8000}}
"""
QUESTION = "What is the capital of France?"


def cluster_yaml(hosts: NetnsHosts) -> dict[str, Any]:
    """The shipped file, with these hosts and with the environment that they share already."""
    head, *workers = hosts.hosts
    text = (ROOT / "configs/ray/local.yaml").read_text().replace("~/blockferry-venv/bin", str(BIN))
    document: dict[str, Any] = yaml.safe_load(text.replace("$HOME/blockferry-venv/bin", str(BIN)))
    document["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    document["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    document["setup_commands"] = [command for command in document["setup_commands"] if ".bashrc" in command]
    del document["file_mounts"]["~/blockferry"]
    return document


def ray_command(hosts: NetnsHosts, command: str, file: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(BIN / "ray"), command, "-y", *(["--no-config-cache"] if command == "up" else []), str(file)]
    env = {"RAY_UP_enable_autoscaler_v2": "0", "RAY_AUTH_MODE": "token", "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
    return hosts.launch(arguments, env=env, timeout_s=180)


def wait_until_gone(hosts: NetnsHosts, host: Host, command: str) -> None:
    """Until a command that lists what should go lists nothing."""
    deadline = time.monotonic() + 60
    while left := hosts.ssh(host, command, timeout_s=20).stdout:
        assert time.monotonic() < deadline, (host.name, left)
        time.sleep(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHosts]:
    assert missing_tools() == [], f"install iproute2, openssh-server and rsync: {missing_tools()} not found"
    smollm2_dir()
    scratch = tmp_path_factory.mktemp("hosts")
    with NetnsHosts(scratch, ["head", "w1", "w2"], keep=python_folders(ROOT, cache_dir())) as hosts:
        token = scratch / f"fs_{LAUNCHER}" / "root" / ".ray" / "auth_token"
        token.parent.mkdir(parents=True)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        file = scratch / "cluster.yaml"
        file.write_text(yaml.safe_dump(cluster_yaml(hosts)))
        up = ray_command(hosts, "up", file)
        assert up.returncode == 0, up.stdout[-3000:] + up.stderr[-3000:]
        yield hosts
        down = ray_command(hosts, "down", file)
        assert down.returncode == 0, down.stderr[-3000:]
        for host in hosts.hosts:
            wait_until_gone(hosts, host, "pgrep -x 'raylet|gcs_server'")


def on_head(hosts: NetnsHosts, command: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    head: Host = hosts.hosts[0]
    return hosts.ssh(head, f"export RAY_AUTH_MODE=token; {command}", timeout_s=timeout_s)


def wait_for_nodes(hosts: NetnsHosts, count: int) -> None:
    script = "import ray; ray.init(address='auto', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
    deadline = time.monotonic() + 90
    answer = ""
    while time.monotonic() < deadline:
        answer = on_head(hosts, f'{BIN}/python -c "{script}"', timeout_s=60).stdout
        if answer.strip().endswith(str(count)):
            return
    raise AssertionError(f"{count} nodes did not join within 90 s: {answer}")


def test_prefill_and_decode_on_different_hosts_give_the_demos_answer(cluster: NetnsHosts) -> None:
    wait_for_nodes(cluster, 3)
    config = cluster.scratch / "deployment.yaml"
    config.write_text(DEPLOYMENT)
    log = cluster.scratch / "serve.log"
    serve = f"nohup {BIN}/blockferry serve {config} --address auto >{log} 2>&1 & echo $!"
    pid = on_head(cluster, serve, timeout_s=30).stdout.strip()
    try:
        deadline = time.monotonic() + 240
        while "is served at" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            assert on_head(cluster, f"kill -0 {pid}", timeout_s=20).returncode == 0, log.read_text()
            time.sleep(1)
        status = json.loads(on_head(cluster, f"{BIN}/blockferry status --json", timeout_s=60).stdout)
        generate = f"{BIN}/blockferry generate {config} '{QUESTION}' --json"  # attaches
        done = on_head(cluster, generate, timeout_s=120)
        assert done.returncode == 0, done.stderr
        [output] = json.loads(done.stdout)["outputs"]
    finally:
        on_head(cluster, f"kill -TERM {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.2; done", timeout_s=60)
    assert output["text"] == "The capital of France is Paris."
    assert output["metrics"]["transfer_blocks"] == 3
    assert output["metrics"]["transfer_bytes"] > 0
    [deployment] = status["deployments"]
    addresses = {worker["instance_id"]: worker["address"] for worker in deployment["workers"]}
    assert sorted(addresses.values()) == [host.address for host in cluster.hosts[1:]], addresses


def transfer_bench(hosts: NetnsHosts, options: str) -> subprocess.CompletedProcess[str]:
    wait_for_nodes(hosts, 3)
    return on_head(hosts, f"{BIN}/blockferry bench transfer --address auto {options}", timeout_s=240)


def test_transfers_between_two_hosts_are_measured_from_a_third(cluster: NetnsHosts) -> None:
    options = "--src w1 --dst w2 --piece 64KiB --size 4MiB --tp 1:2 --num-runs 2 --net-device eth0 --json"
    done = transfer_bench(cluster, options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # every byte was checked, or there would be an error
    assert document["command"] == "bench transfer"
    assert {result["name"] for result in document["results"]} == {
        *("transfer", "ceiling", "ratio", "ratio_of_best", "block_time", "cpu", "socket_pieces", "socket_contiguous")
    }
    cases = {(result["params"]["pattern"], result["params"]["mode"]) for result in document["results"]}
    assert cases == {(pattern, mode) for pattern in ("contiguous", "scattered") for mode in ("push", "pull")}
    for result in document["results"]:
        assert result["value"] > 0
        assert (
            result["params"] | {"path": "tcp", "piece_bytes": 65536, "tp": "1:2", "src": "w1", "dst": "w2"}
            == (result["params"])
        )
    for host in cluster.hosts:
        wait_until_gone(cluster, host, "pgrep -af [T]ransferEnd; ls /dev/shm | grep ucx")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--src w1 --dst w9", "--dst='w9' is no node of this cluster; its nodes: "),
        ("--src w1 --dst w2 --path shm", "path='shm' needs both ends on one host"),
    ],
)
def test_ends_that_cannot_be_are_one_clear_line(cluster: NetnsHosts, options: str, complaint: str) -> None:
    done = transfer_bench(cluster, options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert complaint in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
