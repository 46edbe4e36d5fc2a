"""`ray up` on three hosts: prefill on one, decode on another, blocks between them over UCX TCP, nothing left.

And `bench transfer` between two of them, asked for on the third.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from support.cluster import MODEL, smollm2_dir
from support.netns_hosts import NetnsHosts
from support.ray_up import BIN, on_head, serving, status_of, three_hosts, wait_for_nodes, wait_until_gone

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHosts]:
    smollm2_dir()
    with three_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def test_prefill_and_decode_on_different_hosts_give_the_demos_answer(cluster: NetnsHosts) -> None:
    wait_for_nodes(cluster, 3)
    with serving(cluster, DEPLOYMENT) as config:
        status = status_of(cluster)
        generate = f"{BIN}/blockferry generate {config} '{QUESTION}' --json"  # attaches
        done = on_head(cluster, generate, timeout_s=120)
        assert done.returncode == 0, done.stderr
        [output] = json.loads(done.stdout)["outputs"]
    assert output["text"] == "The capital of France is Paris."
    assert output["metrics"]["transfer_blocks"] == 3
    assert output["metrics"]["transfer_bytes"] > 0
    addresses = {worker["instance_id"]: worker["address"] for worker in status["workers"]}
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
