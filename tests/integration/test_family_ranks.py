"""Every family on several ranks, tensor- and pipeline-parallel, samples what transformers says: float32, cold and warm.

Plans come from the real scheduler and ledger of an instance of that shape; ranks are processes joined by gloo.
"""

from pathlib import Path

import pytest
from support.family_ranks import RankCase, execute_cases
from support.local_engine import EngineOptions, LocalEngine, OracleExecutor
from support.parity_cases import GROWING, NAMES, WORKLOAD, preempting_pool
from support.parity_table import RecordCell
from support.rank_processes import run_ranks
from support.tiny_families import FAMILIES, build

pytestmark = pytest.mark.slow


def check_all_families(families_folder: Path, meeting_point: Path, options: EngineOptions) -> None:
    """The ranks are started once: most of the time is theirs to import torch."""
    cases, answers = [], []
    for name in NAMES:
        path = build(FAMILIES[name], families_folder)
        own = preempting_pool(options, path)
        engine = LocalEngine(path, own, OracleExecutor(GROWING.sequences(path) + WORKLOAD.sequences(path)))
        for workload in (GROWING, WORKLOAD, WORKLOAD):
            engine.generate(workload.prompts, workload.num_output)
        cases.append(RankCase(path=path, options=own, plans=[plan for plan, _ in engine.steps]))
        answers.append([result.token_ids.tolist() for _, result in engine.steps])

    ranks = run_ranks(cases[0].options.worker_spec(cases[0].path), meeting_point, execute_cases, cases)

    sampled = next(rank for rank in reversed(ranks) if rank[0])
    wrong = [name for name, ours, theirs in zip(NAMES, sampled, answers, strict=True) if ours != theirs]
    assert wrong == []


def test_two_tensor_parallel_ranks_sample_the_same_tokens(
    families_folder: Path, tmp_path: Path, record_cell: RecordCell
) -> None:
    check_all_families(families_folder, tmp_path / "meet", options_of(tp_size=2))
    for name in NAMES:
        record_cell(name, "TP 2")


def test_two_pipeline_stages_sample_the_same_tokens(
    families_folder: Path, tmp_path: Path, record_cell: RecordCell
) -> None:
    check_all_families(families_folder, tmp_path / "meet", options_of(pp_size=2))
    for name in NAMES:
        record_cell(name, "PP 2")


@pytest.mark.full
def test_two_stages_of_two_ranks_sample_the_same_tokens(families_folder: Path, tmp_path: Path) -> None:
    check_all_families(families_folder, tmp_path / "meet", options_of(tp_size=2, pp_size=2))


def options_of(**shape: int) -> EngineOptions:
    return EngineOptions(max_model_len=128, max_num_batched_tokens=48, **shape)
