"""The uniform and the unified planner against recorded plans of vLLM 0.33: all that was recorded."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from blockferry.engine.kv.replay_planning import family_of, replay_case, replay_planning

DOCUMENT: dict[str, Any] = json.loads(lzma.decompress((Path(__file__).parent / "planning.json.xz").read_bytes()))
FAMILIES = {
    "1full+23swa": 1,
    "20full+30swa (the FIXME case)": 1,
    "2windows": 12,
    "3types": 13,
    "f+s+m": 16,
    "full+chunked": 10,
    "full+mamba": 34,
    "full+swa": 57,
    "gemma3-27b 10full+52swa": 1,
    "gpt-oss-20b+eagle 13full+12swa": 1,
    "mixedhead+swa": 20,
    "mixedheads": 37,
    "mla": 25,
    "mla+swa": 19,
    "odd-page": 13,
    "swa-only": 16,
    "uniform": 24,
}


def test_every_expected_family_is_recorded() -> None:
    counts: dict[str, int] = {}
    for case in DOCUMENT["cases"]:
        counts[family_of(case)] = counts.get(family_of(case), 0) + 1
    assert counts == FAMILIES


@pytest.mark.parametrize("case", DOCUMENT["cases"], ids=lambda case: str(case["id"]))
def test_plan_agrees_with_the_recorded_one(case: dict[str, Any]) -> None:
    assert replay_case(case) is None


def test_report_counts_a_changed_case_and_shows_it_in_full() -> None:
    cases = [dict(case) for case in DOCUMENT["cases"] if family_of(case) == "swa-only"]
    cases[1]["out"] = cases[1]["out"] | {"bytes_per_block": 1}
    report = replay_planning({"cases": cases}, file="planning.json").as_json()
    assert (report["cases"], report["matched"]) == (len(cases), len(cases) - 1)
    assert report["families"] == {"swa-only": {"cases": len(cases), "matched": len(cases) - 1}}
    assert str(report["first_mismatch"]).startswith(f"{cases[1]['id']}: bytes_per_block is ")
    assert str(report["first_mismatch"]).endswith(", recorded 1")


@pytest.mark.parametrize("kind", ["error", "size_error"])
def test_a_recorded_error_that_we_do_not_raise_is_a_mismatch(kind: str) -> None:
    case = next(case for case in DOCUMENT["cases"] if "num_blocks" in case["out"])
    assert replay_case(case | {"out": {kind: "no"}}) == f"{case['id']}: {kind} is None, recorded no"


def test_unknown_layer_type_is_named() -> None:
    case = DOCUMENT["cases"][0]
    with pytest.raises(ValueError, match="layer type 'ring' is unknown; use one of full, swa"):
        replay_case(case | {"layers": [case["layers"][0] | {"type": "ring"}]})
