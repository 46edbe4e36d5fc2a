"""Every family in every combination continues prompts token for token as transformers does, in float32.

One rank here; ranks in processes of their own and prefill/decode pairs are in the files beside this one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_engine import LocalEngine, start_worker
from support.parity_cases import ParityCase, cases, preempting_pool
from support.parity_table import RecordCell
from support.tiny_families import FAMILIES, build

pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which combinations are possible is the planners' to say."""
    strength = 3 if metafunc.function is test_every_triple_of_choices_gives_the_same_tokens else 2
    if "case" in metafunc.fixturenames:
        # triples take seconds to choose, which nobody should wait for who leaves them out
        is_wanted = strength == 2 or "not full" not in metafunc.config.option.markexpr
        made = cases(strength=strength) if is_wanted else []
        metafunc.parametrize("case", made, ids=[case.name for case in made])


def check(case: ParityCase, families_folder: Path, record_cell: RecordCell) -> None:
    """Cold, then warm; every block is free again afterwards."""
    path = build(FAMILIES[case.family], families_folder)
    options = preempting_pool(case.options, path) if case.preempts else case.options
    engine = LocalEngine(path, options, start_worker(path, options))

    assert engine.generate(case.workload.prompts, case.workload.num_output) == case.workload.expected(path)
    assert engine.generate(case.workload.prompts, case.workload.num_output) == case.workload.expected(path)

    stats = engine.kv.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_hit_tokens > 0) == options.enable_caching or case.preempts
    for feature in features(case, engine):
        record_cell(case.family, feature)


def features(case: ParityCase, engine: LocalEngine) -> Iterator[str]:
    """What a case has shown."""
    if case.options.enable_caching:
        yield "cold and warm cache"
    if case.options.max_num_batched_tokens < max(map(len, case.workload.prompts)):
        yield "chunked prompts"
    if engine.instance.num_preemptions:
        yield "preemption"
    if case.options.layout.startswith("L"):
        yield "layers outermost"
    if case.options.planner is not None:
        yield f"{case.options.planner} plan"


def test_every_pair_of_choices_gives_the_same_tokens(
    case: ParityCase, families_folder: Path, record_cell: RecordCell
) -> None:
    check(case, families_folder, record_cell)


@pytest.mark.full
def test_every_triple_of_choices_gives_the_same_tokens(
    case: ParityCase, families_folder: Path, record_cell: RecordCell
) -> None:
    check(case, families_folder, record_cell)
