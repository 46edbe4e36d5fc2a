"""`bench transfer` with two real processes, small."""

import pytest
from support.shared_memory import no_segments_left

from blockferry.cluster.bench.transfer import plot_of, run_transfer_bench

pytestmark = pytest.mark.ucx


def test_every_case_is_measured_against_its_ceiling(tmp_path):
    with no_segments_left():
        report = run_transfer_bench(piece_sizes=(4096, 65536), num_bytes=1 << 20, num_runs=2)
    document = report.to_json()
    assert document["command"] == "bench transfer"
    cases = {}
    for result in document["results"]:
        assert result["value"] > 0
        assert len(result["runs"]) == 2
        cases.setdefault(tuple(result["params"].items()), set()).add(result["name"])
    assert len(cases) == 2 * 2 * 2 * 2
    assert set(map(frozenset, cases.values())) == {frozenset({"transfer", "ceiling", "ratio"})}
    assert {name for name, _ in next(iter(cases))} == {"path", "pattern", "piece_bytes", "mode"}
    plot_of(tmp_path / "plot.png").draw(report.results)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_no_case_starts_after_the_time_limit():
    report = run_transfer_bench(paths=("shm",), piece_sizes=(4096,), num_bytes=1 << 20, num_runs=1, time_limit_s=-1.0)
    assert report.results == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": ("infiniband",)}, "path='infiniband' is unknown; use shm, tcp"),
        ({"modes": ("shove",)}, "mode='shove'"),
        ({"patterns": ("zigzag",)}, "pattern='zigzag'"),
        ({"num_runs": 0}, "num_runs=0"),
        ({"piece_sizes": (1 << 20,), "num_bytes": 4096}, "piece_bytes=1048576 is larger"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, words):
    with pytest.raises(ValueError, match=words):
        run_transfer_bench(**options)
