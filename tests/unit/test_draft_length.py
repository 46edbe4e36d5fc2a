"""How many drafts a row wants: borders, learning, stopping and trying again."""

import numpy as np
import pytest

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.scheduler.draft_length import PROBE_INTERVAL, make_draft_lengths, paying_rate

ROW = np.array([0])


def make(num_tokens: int = 3, *, is_adaptive: bool = True, max_rows: int = 4):
    config = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=num_tokens, is_adaptive=is_adaptive)
    lengths = make_draft_lengths(config, max_rows=max_rows)
    for row in range(max_rows):
        lengths.start(row)
    return lengths


def int32(*values):
    return np.array(values, np.int32)


def learn(lengths, num_drafts: int, num_accepted: int, times: int = 1) -> None:
    for _ in range(times):
        lengths.learn(ROW, int32(num_drafts), int32(num_accepted))


def wanted(lengths, num_tokens: int = 1) -> int:
    return int(lengths.wanted(ROW, int32(num_tokens)).now[0])


def test_a_row_begins_with_all_drafts():
    assert wanted(make()) == 3


def test_a_row_whose_drafts_hold_keeps_them():
    lengths = make()
    learn(lengths, 3, 3, times=20)
    assert wanted(lengths) == 3


@pytest.mark.parametrize(("acceptance", "expected"), [(0.03, 0), (0.2, 1), (0.33, 2), (0.6, 3)])
def test_the_jth_draft_is_wanted_where_the_rate_to_the_j_pays(acceptance, expected):
    assert sum(acceptance**place > paying_rate(1) for place in (1, 2, 3)) == expected
    lengths, generator = make(), np.random.default_rng(0)
    seen = []
    for step in range(4000):
        num_drafts = wanted(lengths, 1 + step) or 0
        if step > 100:
            seen.append(num_drafts)
        is_right = generator.random(3) < acceptance
        learn(lengths, num_drafts, min(num_drafts, int(np.logical_and.accumulate(is_right).sum())))
    assert abs(np.mean(seen) - expected) < 0.6


def test_a_row_without_drafts_learns_nothing():
    lengths = make()
    learn(lengths, 3, 0, times=4)
    before = wanted(lengths)
    learn(lengths, 0, 0, times=100)
    assert wanted(lengths) == before


def test_a_row_whose_drafts_fail_stops_but_for_a_probe_now_and_then():
    lengths = make()
    learn(lengths, 3, 0, times=50)
    drafts = [wanted(lengths, length) for length in range(1, 2 * PROBE_INTERVAL + 1)]
    assert [index + 1 for index, count in enumerate(drafts) if count] == [PROBE_INTERVAL, 2 * PROBE_INTERVAL]
    assert max(drafts) == 1


def test_the_step_before_a_probe_asks_for_its_draft():
    lengths = make()
    learn(lengths, 3, 0, times=50)
    assert int(lengths.wanted(ROW, int32(PROBE_INTERVAL - 1)).then[0]) == 1
    assert int(lengths.wanted(ROW, int32(PROBE_INTERVAL)).then[0]) == 0


def test_one_successful_probe_lets_a_row_draft_again():
    lengths = make()
    learn(lengths, 3, 0, times=50)
    learn(lengths, 1, 1)
    assert wanted(lengths) == 1
    learn(lengths, 1, 0, times=10)
    assert wanted(lengths) == 0


def test_more_must_hold_the_more_rows_share_a_step():
    lengths = make(max_rows=64)
    rows = np.arange(64)
    for _ in range(40):  # half of the first drafts hold, and none of the others
        lengths.learn(rows, np.full(64, 3, np.int32), np.zeros(64, np.int32))
        lengths.learn(rows, np.full(64, 1, np.int32), np.ones(64, np.int32))
    drafts = [int(lengths.wanted(rows[:count], np.ones(count, np.int32)).now[0]) for count in (1, 4, 16, 64)]
    assert drafts == [3, 2, 1, 0]


def test_rows_learn_by_themselves():
    lengths = make()
    rows = np.array([3, 1])
    for _ in range(50):
        lengths.learn(rows, int32(3, 3), int32(0, 3))
    assert lengths.wanted(np.arange(4), np.ones(4, np.int32)).now.tolist() == [3, 3, 3, 0]


def test_a_new_sequence_of_a_row_begins_anew():
    lengths = make()
    learn(lengths, 3, 0, times=50)
    lengths.start(0)
    assert wanted(lengths) == 3


def test_without_adaptation_all_drafts_are_wanted_whatever_comes_of_them():
    lengths = make(2, is_adaptive=False)
    learn(lengths, 2, 0, times=50)
    assert wanted(lengths) == 2
