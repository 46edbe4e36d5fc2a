"""Ends of `bench transfer` as actors of a Ray cluster of this machine."""

import contextlib

import psutil
import pytest
from support.shared_memory import no_segments_left

from blockferry.cluster import ray_session
from blockferry.cluster.bench.transfer import TransferBenchConfig, run_transfer_bench
from blockferry.cluster.bench.transfer_actors import cluster_nodes, find_node, open_actors
from blockferry.cluster.bench.transfer_links import ask_all
from blockferry.cluster.bench.transfer_pools import Amount, Side
from blockferry.connectors.base import TransportError

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture(scope="module")
def node():
    session = ray_session.start_local({"CPU": 2})
    try:
        [only] = cluster_nodes()
        yield find_node([only], only.node_id[:8], option="--src")
    finally:
        session.close()


def test_blocks_arrive_whole_between_actors(node):
    config = TransferBenchConfig(
        piece_sizes=(4096,), amount=Amount(num_bytes=1 << 20), num_runs=1, dst=Side(tp_size=2), where={"src": "here"}
    )
    with no_segments_left(), contextlib.closing(open_actors([node], [node, node])) as ends:
        results = run_transfer_bench(config, ends).results
    assert {result.params["path"] for result in results} == {"shm", "tcp"}
    assert {(result.params["tp"], result.params["src"]) for result in results} == {("1:2", "here")}


def test_an_actor_that_dies_is_one_clear_error(node):
    with contextlib.closing(open_actors([node], [node])) as ends:
        ask_all(ends.all, "clock")
        for process in psutil.Process().children(recursive=True):
            if "TransferEnd" in " ".join(process.cmdline()):
                process.kill()
        with pytest.raises(TransportError, match="is gone, in 'clock'") as error:
            ask_all(ends.all, "clock")
    assert len(str(error.value).splitlines()) == 1
