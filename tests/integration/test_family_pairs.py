"""Every family, handed over from a prefill to a decode instance, continues as transformers does, cold and warm."""

from pathlib import Path

import pytest
from support.covering import cover
from support.local_engine import EngineOptions
from support.local_pair import PREFILL, LocalPair
from support.parity_cases import NAMES, WORKLOAD
from support.parity_table import RecordCell
from support.tiny_families import FAMILIES, build

from blockferry.connectors.base import Overlap, TransferMode

pytestmark = pytest.mark.slow
FACTORS = {
    "family": NAMES,
    "mode": tuple(TransferMode),
    "overlap": tuple(Overlap),
    "chunk": (128, 17),
    "caching": (True, False),
    "block_size": (None, 8),
}
ROWS = cover(FACTORS, is_possible=lambda row: row["mode"] == "push" or row["overlap"] != "layers")


@pytest.mark.parametrize("row", ROWS, ids=["-".join(map(str, row.values())) for row in ROWS])
def test_a_handed_over_sequence_continues_with_the_same_tokens(
    row: dict[str, object], families_folder: Path, record_cell: RecordCell
) -> None:
    name, mode = str(row["family"]), TransferMode(str(row["mode"]))
    path = build(FAMILIES[name], families_folder)
    options = EngineOptions(
        max_model_len=128,
        max_num_batched_tokens=row["chunk"],  # type: ignore[arg-type]  # an int by FACTORS
        enable_caching=bool(row["caching"]),
        block_size=row["block_size"],  # type: ignore[arg-type]  # an int or None by FACTORS
    )
    pair = LocalPair(path, options, mode=mode, overlap=Overlap(str(row["overlap"])))
    try:
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    finally:
        pair.close()

    assert pair.num_ferried_bytes > 0
    for ledger in pair.ledgers.values():
        assert ledger.stats().num_free_blocks == ledger.stats().num_blocks
    # of a recurrent layer only the last state arrives on the other side, where no other sequence can start from it
    assert (pair.ledgers[PREFILL].stats().num_hit_tokens > 0) == options.enable_caching
    record_cell(name, f"P/D {mode}")
