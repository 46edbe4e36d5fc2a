"""Prefill and decode on two hosts whose link breaks: for a moment, and for good."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fault_cluster import MAX_TOKENS, WIDE
from support.fault_load import Outcome
from support.netns_hosts import Host, NetnsHosts
from support.ray_up import BIN, serving, status_of, three_hosts, wait_for_nodes
from support.tiny_families import VOCAB_SIZE, build, make_prompt
from support.tiny_tokenizers import save_characters

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

LOAD = Path(__file__).parents[1] / "support" / "fault_load.py"
PORT = 8000
SILENCE_LIMIT_S = 12.0
CUT_S = 3.0  # TCP tries again within as long after the link is back
LIMIT_S = 90.0
DEPLOYMENT = """
name: two-hosts
model: {{path: {path}, dtype: float32, max_model_len: 2048}}
cache: {{memory: 128MiB}}
scheduler: {{max_num_seqs: 8, max_num_batched_tokens: 256}}
instances: [{{role: prefill}}, {{role: decode}}]
connector: {{lease_s: 6, transfer_timeout_s: 2, ucx_options: {{NET_DEVICES: eth0}}}}
health: {{silence_limit_s: {silence_limit_s}}}
api: {{host: {host}, port: {port}}}
"""
PROMPTS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate((900, 700, 40, 300) * 2)]


@dataclasses.dataclass(kw_only=True)
class Served:
    """A running deployment, asked from the launcher's namespace."""

    hosts: NetnsHosts
    expected: list[str] = dataclasses.field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.hosts.hosts[0].address}:{PORT}"

    def load(self, num_requests: int, *, seed: int) -> Outcome:
        arguments = {
            "url": self.url,
            "prompts": PROMPTS,
            "expected": self.expected,
            "num_requests": num_requests,
            "concurrency": 6,
            "max_tokens": MAX_TOKENS,
            "limit_s": LIMIT_S,
            "seed": seed,
        }
        file = self.hosts.scratch / "load.json"
        file.write_text(json.dumps(arguments))
        done = self.hosts.launch([str(BIN / "python"), str(LOAD), str(file)], env={}, timeout_s=3 * LIMIT_S)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        self.expected = answer["expected"]
        return Outcome(**answer["outcome"])

    def under_load(self, num_requests: int, *, seed: int) -> tuple[threading.Thread, list[Outcome]]:
        found: list[Outcome] = []
        thread = threading.Thread(target=lambda: found.append(self.load(num_requests, seed=seed)))
        thread.start()
        return thread, found

    def host_of(self, instance_id: str) -> Host:
        (address,) = [one["address"] for one in status_of(self.hosts)["workers"] if one["instance_id"] == instance_id]
        return next(host for host in self.hosts.hosts if host.address == address)

    def settle(self, limit_s: float) -> dict[str, Any]:
        """Until every block of every surviving instance is free."""
        deadline_s = time.monotonic() + limit_s
        while True:
            status = status_of(self.hosts)
            alive = [one for one in status["instances"] if one["state"] == "serving"]
            is_free = all(one["num_free_blocks"] == one["num_blocks"] for one in alive)
            if is_free and not status["num_unfinished"] and not any(status["handoffs"].values()):
                return status
            assert time.monotonic() < deadline_s, status
            time.sleep(1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("hosts")
    path = build(WIDE, scratch)
    save_characters(path, VOCAB_SIZE)
    with three_hosts(scratch) as hosts:
        wait_for_nodes(hosts, 3)
        text = DEPLOYMENT.format(path=path, silence_limit_s=SILENCE_LIMIT_S, host=hosts.hosts[0].address, port=PORT)
        with serving(hosts, text):
            one = Served(hosts=hosts)
            assert one.load(6, seed=0).num_exact == 6
            yield one


def check(outcome: Outcome, num_requests: int) -> None:
    assert (outcome.wrong, outcome.num_hung, outcome.num_requests) == ([], 0, num_requests), outcome


def test_a_link_that_is_down_for_a_moment_costs_no_request(served: Served) -> None:
    decode = served.host_of("decode-0")
    thread, found = served.under_load(30, seed=1)
    time.sleep(2.0)
    for _ in range(2):
        served.hosts.cut(decode)
        time.sleep(CUT_S)
        served.hosts.mend(decode)
        time.sleep(2 * CUT_S)
    thread.join()
    check(found[0], 30)
    assert found[0].num_errors == 0, found[0]
    status = served.settle(60.0)
    assert status["healthy"], status["reason"]


def test_a_link_that_stays_down_ends_every_request_with_an_error(served: Served) -> None:
    decode = served.host_of("decode-0")
    thread, found = served.under_load(30, seed=2)
    time.sleep(1.0)
    served.hosts.cut(decode)
    thread.join()
    served.hosts.mend(decode)
    check(found[0], 30)
    print(found[0])
    assert found[0].num_errors > 0
    status = served.settle(90.0)
    assert not status["is_serving"]
    assert "decode-0" in status["reason"]
