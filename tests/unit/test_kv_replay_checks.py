"""What a recording may hold: every one-field edit that no recorder makes is refused with its place, value and limit."""

import copy
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockferry.engine.kv.replay_checks import check_traces
from blockferry.engine.kv.replay_planning_checks import check_cases
from blockferry.engine.kv.replay_traces import ReplayLevel, replay_trace

RECORDINGS = Path(__file__).parents[1] / "conformance"
Edit = Callable[[dict[str, Any]], object]

OUT = {"free": 7, "keys": 0}
TRACE: dict[str, Any] = {
    "id": "full-0",
    "config": {
        "num_blocks": 8,
        "groups": [{"type": "full", "block_size": 4}],
        "scheduler_block_size": 4,
        "hash_block_size": 4,
        "max_model_len": 32,
        "max_in_flight_tokens": 16,
        "enable_caching": True,
        "use_eagle": False,
        "watermark": 0.0,
        "retention": None,
        "events": False,
        "dcp": 1,
        "hash_lookahead": 0,
    },
    "ops": [
        {"op": "step"},
        {"op": "new", "r": "a", "segs": [[100, 8]], "salt": "s"},
        {"op": "lookup", "r": "a", "out": {"hit": 0, "boundary": 0, "blocks": [[]], **OUT}},
        {
            "op": "alloc",
            "r": "a",
            "n": 8,
            "adopt": 0,
            "computed": 8,
            "out": {"ok": True, "new": [[1, 2]], "free": 5, "keys": 2},
        },
        {"op": "append", "r": "a", "toks": [5]},
        {"op": "computed", "r": "a", "v": 8},
        {"op": "cache", "r": "a", "n": 8, "out": {"free": 5, "keys": 2}},
        {"op": "evict", "ids": [2], "out": {"free": 5, "keys": 1}},
        {"op": "free", "r": "a", "out": {"free": 7, "keys": 1}},
    ],
}
NEW, LOOKUP, ALLOC, APPEND, COMPUTED, CACHE, EVICT, FREE = range(1, 9)


def document_of(name: str) -> dict[str, Any]:
    return dict(json.loads(lzma.decompress((RECORDINGS / name).read_bytes())))


def test_all_recordings_pass() -> None:
    check_traces(document_of("kv_traces.json.xz"))
    check_cases(document_of("planning.json.xz"))


def test_the_trace_that_is_edited_below_passes() -> None:
    check_traces({"format": 1, "traces": [TRACE]})


def set_config(**values: object) -> Edit:
    return lambda trace: trace["config"].update(values)


def set_group(**values: object) -> Edit:
    return lambda trace: trace["config"]["groups"][0].update(values)


def set_op(number: int, **values: object) -> Edit:
    return lambda trace: trace["ops"][number].update(values)


@pytest.mark.parametrize(
    ("edit", "place", "complaint"),
    [
        (set_config(groups="x"), "", "groups is 'x'; it must be a list of 1 or more"),
        (set_config(num_blocks=10**12), "", "num_blocks is 1000000000000; it must be an integer from 2 to 4194304"),
        (set_config(max_model_len=0), "", "max_model_len is 0"),
        (set_config(max_model_len=10**15), "", "max_model_len is 1000000000000000; it must be"),
        (set_config(hash_block_size=0), "", "hash_block_size is 0"),
        (set_config(hash_block_size=3), "", "hash_block_size is 3; it must divide"),
        (set_config(scheduler_block_size=0), "", "scheduler_block_size is 0"),
        (set_config(scheduler_block_size=8), "", "scheduler_block_size is 8; it must be 4"),
        (lambda trace: trace["config"].pop("scheduler_block_size"), "", "config has no scheduler_block_size"),
        (set_config(max_in_flight_tokens=-1), "", "max_in_flight_tokens is -1"),
        (set_config(enable_caching="yes"), "", "enable_caching is 'yes'; it must be true or false"),
        (set_config(watermark=1.5), "", "watermark is 1.5"),
        (set_config(dcp=0), "", "dcp is 0"),
        (set_config(colour=1), "", "config has the unknown key 'colour'; known are num_blocks"),
        (set_group(block_size=0), "group 0: ", "block_size is 0"),
        (set_group(type="ring"), "group 0: ", "type is 'ring'; known are full, swa"),
        (set_group(window=4), "group 0: ", "the group has the unknown key 'window'"),
        (lambda trace: trace.update(ops={}), "", "ops is {}"),
        (lambda trace: trace.update(ops=[]), "", "ops is []"),
        (lambda trace: trace.update(ops=[{"op": "step"}]), "", "nothing to compare"),
        (set_op(NEW, op="frobnicate"), "operation 1: ", "op is 'frobnicate'; known are new, step, lookup"),
        (set_op(NEW, segs=[[0, 10**7]]), "operation 1 (new): ", "10000000 tokens with these; max_model_len is 32"),
        (set_op(NEW, segs=[[10**30, 4]]), "operation 1 (new): ", "segs[0][0] is 10000"),
        (set_op(NEW, salt=5), "operation 1 (new): ", "salt is 5"),
        (lambda trace: trace["ops"].insert(2, trace["ops"][1]), "operation 2 (new): ", "'a' exists already"),
        (lambda trace: trace["ops"][LOOKUP].pop("out"), "operation 2 (lookup): ", "it has no out"),
        (set_op(LOOKUP, r="b"), "operation 2 (lookup): ", "request 'b' is unknown"),
        (lambda trace: trace["ops"][ALLOC].pop("out"), "operation 3 (alloc): ", "it has no out"),
        (set_op(ALLOC, out={}), "operation 3 (alloc): ", "out has no ok"),
        (set_op(ALLOC, adopt=10**6), "operation 3 (alloc): ", "adopt is 1000000"),
        (set_op(ALLOC, adopt=-1), "operation 3 (alloc): ", "adopt is -1"),
        (set_op(ALLOC, adopt=8), "operation 3 (alloc): ", "adopt is 8; a request of 8 tokens can adopt one less"),
        (set_op(ALLOC, n=-4), "operation 3 (alloc): ", "n is -4"),
        (set_op(APPEND, toks=[10**30]), "operation 4 (append): ", "toks[0] is 1000"),
        (set_op(COMPUTED, v=-9), "operation 5 (computed): ", "v is -9"),
        (set_op(COMPUTED, v=10**9), "operation 5 (computed): ", "v is 1000000000"),
        (set_op(CACHE, n=10**9), "operation 6 (cache): ", "n is 1000000000"),
        (set_op(CACHE, n=9), "operation 6 (cache): ", "n is 9; 8 tokens of the request are known and computed"),
        (set_op(EVICT, ids=[10**6, -3]), "operation 7 (evict): ", "ids[0] is 1000000; it must be an integer from 1 to"),
        (set_op(EVICT, ids=[0]), "operation 7 (evict): ", "ids[0] is 0; it must be an integer from 1 to 7"),
        (lambda trace: trace["ops"].append(trace["ops"][FREE]), "operation 9 (free): ", "'a' holds no blocks"),
    ],
)
def test_edited_trace_is_refused_with_its_place(edit: Edit, place: str, complaint: str) -> None:
    trace = copy.deepcopy(TRACE)
    edit(trace)
    with pytest.raises(ValueError, match="trace full-0: ") as refused:
        check_traces({"format": 1, "traces": [trace]})
    assert str(refused.value).startswith(f"trace full-0: {place}")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_adopting_other_than_what_was_found_is_refused_where_it_is_played() -> None:
    trace = copy.deepcopy(TRACE)
    trace["ops"][ALLOC]["adopt"] = 4
    check_traces({"traces": [trace]})
    with pytest.raises(ValueError, match=r"trace full-0: operation 3 \(alloc\): adopt is 4; .* found 0 tokens"):
        replay_trace(trace, ReplayLevel.CONTRACT)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"traces": []}, "traces is []"),
        ({"traces": {}}, "traces is {}"),
        ({"format": 99, "traces": [TRACE]}, "format is 99; this version of blockferry reads format 1"),
        ({"traces": [3]}, "trace 0 is 3"),
        ({"traces": [TRACE, {"ops": []}]}, "trace 1: id is None"),
    ],
)
def test_file_that_holds_no_traces_is_refused(document: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^(format|trace)") as refused:
        check_traces(document)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda case: case.update(max_model_len=10**40), "max_model_len is 1000"),
        (lambda case: case.update(out=[]), "out is []; it must be an object"),
        (lambda case: case.update(out={}), "out has no groups"),
        (lambda case: case.update(layout="NHD"), "layout is 'NHD'; known are LBHNC, BLHNC"),
        (lambda case: case.update(layers=[]), "layers is []"),
        (lambda case: case["layers"][0].update(block_size=0), "layer 0: block_size is 0"),
        (lambda case: case["layers"][0].update(type="ring"), "layer 0: type is 'ring'; known are full, swa"),
        (lambda case: case["layers"][0].update(dtype="f64"), "layer 0: dtype is 'f64'"),
        (lambda case: case.pop("memory"), "the case has no memory"),
    ],
)
def test_edited_planning_case_is_refused_with_its_place(edit: Edit, complaint: str) -> None:
    document = document_of("planning.json.xz")
    case = next(case for case in document["cases"] if case["layers"][0]["type"] == "full")
    edit(case)
    with pytest.raises(ValueError, match=r"^case ") as refused:
        check_cases({"cases": [case]})
    assert str(refused.value).startswith(f"case {case['id']}: {complaint}")
