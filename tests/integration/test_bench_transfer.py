"""`bench transfer` with real processes, small."""

import contextlib

import pytest
from support.shared_memory import no_segments_left

from blockferry.cluster.bench.transfer import TransferBenchConfig, plot_of, run_transfer_bench
from blockferry.cluster.bench.transfer_links import ask_all, open_processes
from blockferry.cluster.bench.transfer_pools import Amount, Side
from blockferry.cluster.plan_model import read_model_config
from blockferry.connectors.base import TransportError

pytestmark = pytest.mark.ucx

NAMES = {"transfer", "ceiling", "ratio", "ratio_of_best", "block_time", "cpu"}
SOCKETS = {"socket_pieces", "socket_contiguous"}
UNPACKED = {"unpacked", "gain"}
MIB = Amount(num_bytes=1 << 20)


def measure(**options):
    config = TransferBenchConfig(**{"amount": MIB, "num_runs": 1, **options})
    with no_segments_left(), contextlib.closing(open_processes(config.src.tp_size, config.dst.tp_size)) as ends:
        return run_transfer_bench(config, ends)


def test_every_case_is_measured_against_its_ceiling(tmp_path):
    report = measure(piece_sizes=(4096, 65536), num_runs=2)
    document = report.to_json()
    assert document["command"] == "bench transfer"
    cases = {}
    for result in document["results"]:
        assert result["value"] > 0
        assert len(result["runs"]) == (1 if result["name"] == "ratio_of_best" else 2)
        cases.setdefault(tuple(result["params"].items()), set()).add(result["name"])
    assert len(cases) == 2 * 2 * 2 * 2
    for case, names in cases.items():
        params = dict(case)
        is_small = params["path"] == "tcp" and params["piece_bytes"] == 4096 and params["pattern"] == "scattered"
        assert names == NAMES | (SOCKETS if params["path"] == "tcp" else {"memcpy"}) | (UNPACKED if is_small else set())
    assert {name for name, _ in next(iter(cases))} == {"path", "pattern", "piece_bytes", "mode"}
    plot_of(tmp_path / "plot.png").draw(report.results)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Side(tp_size=1), Side(tp_size=2)),
        (Side(tp_size=3), Side(tp_size=2)),
        (Side(block_size=32), Side(tp_size=2, order="LBNHC", block_size=16)),
    ],
    ids=["1 to 2", "3 to 2", "other blocks and layout"],
)
def test_blocks_of_a_model_arrive_whole_between_sides_that_differ(src, dst):
    config = read_model_config("smollm2-135m")
    options = {"model": "smollm2-135m", "model_config": config, "src": src, "dst": dst, "amount": Amount(num_blocks=4)}
    results = measure(patterns=("scattered",), paths=("shm",), **options).results
    assert {result.params["mode"] for result in results} == {"push", "pull"}
    params = results[0].params
    assert params["model"] == "smollm2-135m"
    assert params["piece_bytes"] == 30 * 3 * src.block_size * 256
    assert params["tp"] == f"{src.tp_size}:{dst.tp_size}"


def test_ranks_send_side_by_side_over_tcp():
    results = measure(src=Side(tp_size=2), dst=Side(tp_size=2), paths=("tcp",), piece_sizes=(4096,)).results
    assert {result.name for result in results} == NAMES | SOCKETS | UNPACKED


def test_no_case_starts_after_the_time_limit():
    assert measure(paths=("shm",), piece_sizes=(4096,), time_limit_s=-1.0).results == []


def test_an_end_that_dies_is_one_clear_error():
    with contextlib.closing(open_processes(1, 1)) as ends:
        ends.dst[0].close()
        with pytest.raises(TransportError, match="dst 0 is gone before 'clock'"):
            ask_all(ends.dst, "clock")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": ("infiniband",)}, "path='infiniband' is unknown; use shm, tcp"),
        ({"modes": ("shove",)}, "mode='shove'"),
        ({"patterns": ("zigzag",)}, "pattern='zigzag'"),
        ({"num_runs": 0}, "num_runs=0"),
        ({"piece_sizes": (1 << 21,)}, "size=1048576 bytes of a transfer is less than a block's 2097152"),
        ({"piece_sizes": (100,)}, "piece_bytes=100 is not a positive multiple of 16"),
        ({"amount": Amount(num_blocks=1 << 30)}, "exceed"),
        ({"model": "tall", "model_config": {"model_type": "llama"}}, "cannot be planned"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, words):
    with pytest.raises(ValueError, match=words):
        TransferBenchConfig(**{"amount": MIB, **options})
