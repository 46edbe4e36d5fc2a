"""`ray up` on three hosts: prefill on one, decode on another, blocks between them over UCX TCP, nothing left.

And `bench transfer` between two of them, asked for on the third; and what becomes of 50 streams when a host is lost.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Iterator

import pytest
from support.cluster import MODEL, smollm2_dir
from support.fault_load import body
from support.host_loss import LossOutcome, RunningLoad, StreamLoad, ask
from support.netns_hosts import SUBNET, Host, NetnsHosts
from support.parity import Reference
from support.ray_up import (
    BIN,
    on_head,
    serving,
    status_of,
    three_hosts,
    wait_for_nodes,
    wait_until_gone,
)
from support.tiny_families import FAMILIES, VOCAB_SIZE, build, make_prompt
from support.tiny_tokenizers import save_characters

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOYMENT = f"""
name: three-hosts
model: {{name: {MODEL}, dtype: float32, max_model_len: 2048}}
cache: {{num_blocks: 300}}
instances:
  - {{role: prefill, resources: {{num_cpus: 1}}}}
  - {{role: decode, resources: {{num_cpus: 1}}}}
api: {{port: 8000}}
"""
# worker hosts offer one CPU each: one of them gets prefill-0 and a decode instance, the other one a decode instance
SURVIVING = """
name: surviving
model: {{path: {path}, dtype: float32, max_model_len: 512}}
cache: {{memory: 64MiB}}
scheduler: {{max_num_seqs: 64}}
instances:
  - {{role: prefill, resources: {{num_cpus: 0.4}}}}
  - {{role: decode, replicas: 2, resources: {{num_cpus: 0.6}}}}
api: {{host: 0.0.0.0, port: 8000}}
"""
# no two logits of their answers come closer than 0.0005
PROMPTS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate((40, 100, 70, 20, 90, 40))]
NUM_STREAMS = 50
MAX_TOKENS = 400
REPAIR_LIMIT_S = 240.0  # the autoscaler looks for dead hosts every 30 s
HEALTH_LIMIT_S = 60.0  # until /health knows that the last host is lost; it takes health.silence_limit_s
QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.", "用中文介绍一下你自己。")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsHosts]:
    smollm2_dir()
    with three_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def test_prefill_and_decode_on_different_hosts_give_the_reference_answers(cluster: NetnsHosts) -> None:
    wait_for_nodes(cluster, 3)
    with serving(cluster, DEPLOYMENT) as config:
        addresses = {worker["instance_id"]: worker["address"] for worker in status_of(cluster)["workers"]}
        decode_host = next(host for host in cluster.hosts if host.address == addresses["decode-0"])
        before = cluster.received_bytes(decode_host)
        questions = " ".join(shlex.quote(question) for question in QUESTIONS)
        done = on_head(cluster, f"{BIN}/blockferry generate {config} {questions} --json", timeout_s=120)  # attaches
        num_received = cluster.received_bytes(decode_host) - before
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)["outputs"]
    assert sorted(addresses.values()) == [host.address for host in cluster.hosts[1:]], addresses
    assert outputs[0]["text"] == "The capital of France is Paris."
    reference = Reference(smollm2_dir())
    for output in outputs:
        assert output["token_ids"] == reference.greedy_after(output["prompt_token_ids"], output["token_ids"])
        assert output["metrics"]["transfer_blocks"] > 0, output["metrics"]  # fewer where a prefix was there
    # and they came over the link that joins the hosts
    assert num_received > sum(output["metrics"]["transfer_bytes"] for output in outputs) > 0


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


URL = f"http://{SUBNET}.1:8000"  # the head's


def hosts_by_instance(hosts: NetnsHosts) -> dict[str, Host]:
    by_address = {host.address: host for host in hosts.hosts}
    return {worker["instance_id"]: by_address[worker["address"]] for worker in status_of(hosts)["workers"]}


@pytest.fixture
def surviving(cluster: NetnsHosts) -> Iterator[NetnsHosts]:
    """A deployment with a decode instance on each worker host; lost hosts are back afterwards."""
    path = build(FAMILIES["llama"], cluster.scratch)
    save_characters(path, VOCAB_SIZE)
    wait_for_nodes(cluster, 3)
    try:
        with serving(cluster, SURVIVING.format(path=path)):
            yield cluster
    finally:
        for host in cluster.lost:
            cluster.revive(host)


def stream_while_losing(hosts: NetnsHosts, host: Host) -> tuple[LossOutcome, float]:
    """What becomes of 50 streams, all under way when a host is lost, and when that was."""
    load = StreamLoad(url=URL, prompts=PROMPTS, num_streams=NUM_STREAMS, max_tokens=MAX_TOKENS, limit_s=240.0)
    running = RunningLoad(hosts, load)
    try:
        assert running.wait_until_all_have_begun() == NUM_STREAMS
        hosts.lose(host)
        lost_s = time.monotonic()
        return running.finish(), lost_s
    finally:
        running.close()


def wait_for_health(hosts: NetnsHosts, status: int, *, limit_s: float) -> str:
    """Until /health answers with a status; its words."""
    deadline = time.monotonic() + limit_s
    while not (answer := ask(hosts, f"{URL}/health")).startswith(str(status)):
        assert time.monotonic() < deadline, f"after {limit_s} s /health still says {answer}"
        time.sleep(0.5)
    return answer


def serving_instances(hosts: NetnsHosts) -> set[str]:
    return {one["instance_id"] for one in status_of(hosts)["instances"] if one["state"] == "serving"}


def wait_until_whole(hosts: NetnsHosts) -> None:
    """Until every instance that the file asks for is there."""
    deadline = time.monotonic() + REPAIR_LIMIT_S
    while not (status := status_of(hosts))["healthy"]:
        assert time.monotonic() < deadline, status
        time.sleep(1.0)


def test_streams_of_a_lost_host_end_as_if_nothing_had_happened(surviving: NetnsHosts) -> None:
    places = hosts_by_instance(surviving)
    [lost] = {places["decode-0"], places["decode-1"]} - {places["prefill-0"]}
    outcome, lost_s = stream_while_losing(surviving, lost)
    latest_s = max(one["ended_s"] for one in outcome.streams) - lost_s
    print(f"{len(outcome.exact)} exact, {len(outcome.failed)} failed, the last after {latest_s:.1f} s")
    assert outcome.wrong == []
    assert [one["error"] for one in outcome.failed] == []  # all are resumed on the other decode instance
    # one decode instance is left: requests can be answered all the time, and /health says so
    assert {one["status"] for one in outcome.health} == {200}
    assert serving_instances(surviving) == {name for name, host in places.items() if host != lost}
    # none is left: nothing can be answered, and both say so
    surviving.lose(places["prefill-0"])
    assert "too few instances" in wait_for_health(surviving, 503, limit_s=HEALTH_LIMIT_S)
    # both boot: Ray comes back on them, and the instances after it
    for host in surviving.lost:
        surviving.revive(host)
    wait_for_health(surviving, 200, limit_s=REPAIR_LIMIT_S)
    wait_until_whole(surviving)
    assert len(serving_instances(surviving)) == len(places)
    answer = ask(surviving, f"{URL}/v1/completions", json.dumps(body(PROMPTS[0], MAX_TOKENS)))
    assert json.loads(answer.removeprefix("200 "))["choices"][0]["text"] == outcome.expected[0]
