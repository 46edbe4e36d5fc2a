"""Prefill and decode instances of different shapes: every kind of cache arrives, and tokens are transformers'.

Some families stand for the kinds of cache: dense, sliding, latent, and states of every sort. The others are tested in
one combination each.
"""

import dataclasses
import itertools
from pathlib import Path

import pytest
from support.covering import Row, cover
from support.local_engine import EngineOptions
from support.local_pair import PREFILL, LocalPair
from support.parity_cases import NAMES, WORKLOAD
from support.parity_table import RecordCell
from support.tiny_families import FAMILIES, build

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.kv.plan import Planner

pytestmark = pytest.mark.slow
ALIKE = ({}, {})
RANKS = {
    "tp 1 to 2": ({}, {"tp_size": 2}),
    "tp 2 to 1": ({"tp_size": 2}, {}),
    "pp 2 to 1": ({"pp_size": 2}, {}),
    "pp 1 to 2": ({}, {"pp_size": 2}),
    "tp 2 to pp 2": ({"tp_size": 2}, {"pp_size": 2}),
}
BLOCKS = {"16 to 32": ({"block_size": 16}, {"block_size": 32}), "32 to 16": ({"block_size": 32}, {"block_size": 16})}
LAYOUTS = {
    "BHLNC to LBNHC": ({"layout": "BHLNC"}, {"layout": "LBNHC"}),
    "LBNHC to BHLNC": ({"layout": "LBNHC"}, {"layout": "BHLNC"}),
    "BHLNC to LBHNC": ({"layout": "BHLNC"}, {"layout": "LBHNC"}),
}
PLANNERS = {
    "unified to slab": ({"planner": Planner.UNIFIED}, {"planner": Planner.SLAB}),  # windows are kept whole on one side
    "slab to uniform": ({"planner": Planner.SLAB}, {"planner": Planner.UNIFORM}),
    "uniform to slab": ({"planner": Planner.UNIFORM}, {"planner": Planner.SLAB}),
}
DIFFERENCES = RANKS | BLOCKS | LAYOUTS
FAMILY_NAMES = ("llama", "gemma3_text", "deepseek_v3", "qwen3_next", "jamba", "bamba", "lfm2")
OTHER_NAMES = tuple(name for name in NAMES if name not in FAMILY_NAMES)
MIXED = cover(
    {
        "family": FAMILY_NAMES,
        "ranks": ("tp 1 to 2", "tp 2 to 1", "pp 2 to 1", "pp 1 to 2", "alike"),
        "blocks": (*BLOCKS, "alike"),
        "layout": (*LAYOUTS, "alike"),
        "mode": tuple(TransferMode),
        "overlap": tuple(Overlap),
    },
    is_possible=lambda row: row["mode"] == "push" or row["overlap"] != "layers",
)


@pytest.mark.parametrize("row", MIXED, ids=["-".join(map(str, row.values())) for row in MIXED])
def test_sides_that_differ_in_several_ways_sample_the_same_tokens(
    row: Row, families_folder: Path, record_cell: RecordCell
) -> None:
    family, mode = str(row["family"]), TransferMode(str(row["mode"]))
    differences = [str(row[name]) for name in ("ranks", "blocks", "layout")]
    check(families_folder, family, differences, mode, Overlap(str(row["overlap"])))
    record_cell(family, "P/D unequal sides")


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_other_families_sample_the_same_tokens(family: str, families_folder: Path, record_cell: RecordCell) -> None:
    check(families_folder, family, ["tp 2 to 1", "16 to 32", "BHLNC to LBNHC"], TransferMode.PUSH)
    record_cell(family, "P/D unequal sides")


@pytest.mark.full
@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("difference", list(DIFFERENCES))
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_sides_that_differ_in_one_way_sample_the_same_tokens(
    family: str, difference: str, mode: TransferMode, families_folder: Path
) -> None:
    check(families_folder, family, [difference], mode)


@pytest.mark.parametrize("difference", list(PLANNERS))
def test_a_window_travels_between_plans_of_any_planner(difference: str, families_folder: Path) -> None:
    check(families_folder, "gemma3_text", [difference], TransferMode.PUSH)


def check(
    families_folder: Path,
    family: str,
    differences: list[str],
    mode: TransferMode,
    overlap: Overlap = Overlap.CHUNKS,
) -> None:
    path = build(FAMILIES[family], families_folder)
    sides = [
        dataclasses.replace(
            EngineOptions(max_model_len=128),
            **dict(
                itertools.chain.from_iterable(
                    (DIFFERENCES | PLANNERS).get(name, ALIKE)[side].items() for name in differences
                )
            ),
        )
        for side in range(2)
    ]
    pair = LocalPair(path, *sides, mode=mode, overlap=overlap)
    try:
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path), "cold"
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path), "warm"
    finally:
        pair.close()

    assert pair.num_ferried_bytes > 0
    for ledger in pair.ledgers.values():
        assert ledger.stats().num_free_blocks == ledger.stats().num_blocks
    assert pair.ledgers[PREFILL].stats().num_hit_tokens > 0
