"""The ledger's benchmark: names and parameters that others parse. No speed is asserted here."""

from blockferry.cluster.bench.kv import KvBenchConfig, run_kv_bench

TINY = KvBenchConfig(
    decode_rows=(4,),
    scheduler_rows=(4,),
    route_tokens=(64,),
    prefill_tokens=(64,),
    prefill_shares=(0.0, 0.5),
    num_churn_requests=40,
    num_pool_blocks=4096,
    num_runs=2,
)


def test_every_documented_result_is_there_with_its_parameters() -> None:
    started: list[str] = []
    report = run_kv_bench(TINY, started.append).to_json()
    assert report["command"] == "bench kv"
    params = {result["name"]: set(result["params"]) for result in report["results"]}
    names = ["decode_step", "scheduler_step", "ratio", "route", "prefill", "churn", "pool_start", "pool_bytes"]
    assert list(params) == names
    assert params["decode_step"] >= {"rows", "groups"}
    assert params["scheduler_step"] >= {"rows", "drafts"}
    assert params["ratio"] >= {"of", "rows", "drafts"}
    assert params["route"] >= {"tokens", "held", "instances"}
    assert params["prefill"] >= {"tokens", "shared", "groups"}
    assert all(result["value"] > 0 for result in report["results"])
    assert {result["params"].get("groups") for result in report["results"]} >= {1, 6, 3}
    assert len(started) == 2 * (3 * (1 + 2 + 1) + 3) + 1
