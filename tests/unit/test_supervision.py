"""What a supervisor does about what it sees."""

import pytest

from blockferry.cluster.supervision import (
    HELD_S,
    MAX_DELAY_S,
    Actions,
    Phase,
    ScaleRefused,
    Seen,
    Streak,
    decide,
    spread,
)
from blockferry.engine.config import InstanceConfig, Role

PD = [InstanceConfig(role=Role.PREFILL), InstanceConfig(role=Role.DECODE)]
TWO_SHAPES = [InstanceConfig(role=Role.PREFILL), *PD]


def seen(instance_id, index, phase=Phase.SERVING, state="serving"):
    return Seen(instance_id=instance_id, index=index, phase=phase, state=state)


def decided(instances, wanted, *, not_before_s=None, now_s=100.0):
    return decide(instances, wanted, not_before_s=not_before_s or {}, now_s=now_s)


def test_nothing_is_done_about_a_deployment_that_is_whole():
    assert decided([seen("prefill-0", 0), seen("decode-0", 1)], {0: 1, 1: 1}) == Actions()


def test_a_failed_instance_is_cleared_away_and_none_comes_while_it_holds_its_place():
    assert decided([seen("prefill-0", 0, state="failed")], {0: 1}) == Actions(clear=("prefill-0",))


def test_another_one_comes_once_the_place_is_free():
    assert decided([seen("decode-0", 1)], {0: 1, 1: 1}) == Actions(start=(0,))


def test_an_instance_that_is_being_cleared_away_is_not_cleared_again():
    assert decided([seen("prefill-0", 0, Phase.LOST, "failed")], {0: 1}) == Actions()


def test_all_that_are_missing_come_at_once():
    assert decided([seen("prefill-0", 0)], {0: 3, 1: 1}) == Actions(start=(0, 0, 1))


def test_one_that_is_coming_is_not_missing():
    assert decided([seen("prefill-1", 0, Phase.COMING, None)], {0: 1}) == Actions()


def test_one_that_leaves_for_good_does_not_count():
    leaving = seen("prefill-0", 0, Phase.SURPLUS, "draining")
    assert decided([leaving], {0: 1}) == Actions(start=(0,))


def test_the_place_of_one_that_leaves_for_another_is_kept():
    leaving = seen("prefill-0", 0, Phase.VACATING, "draining")
    assert decided([leaving], {0: 1}) == Actions()


def test_more_than_wanted_is_left_to_whoever_asked_for_it():
    assert decided([seen("prefill-0", 0), seen("prefill-1", 0, Phase.COMING, None)], {0: 1}) == Actions()


def test_an_attempt_is_not_made_before_it_is_due():
    assert decided([], {0: 1, 1: 1}, not_before_s={0: 101.0}) == Actions(start=(1,))
    assert decided([], {0: 1, 1: 1}, not_before_s={0: 101.0}, now_s=101.0) == Actions(start=(0, 1))


def test_the_first_failure_is_made_good_at_once_and_later_ones_wait_longer_and_longer():
    streak = Streak(now_s=0.0)
    assert [streak.fail(now_s=float(second)) for second in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_waits_are_bounded():
    streak = Streak(now_s=0.0)
    assert [streak.fail(now_s=0.0) for _ in range(40)][-1] == MAX_DELAY_S


def test_what_was_up_long_enough_begins_a_new_streak():
    streak = Streak(now_s=0.0)
    streak.fail(now_s=1.0)
    streak.up(now_s=2.0)
    streak.fail(now_s=2.0 + HELD_S / 2)
    assert streak.num_failures == 2
    streak.up(now_s=100.0)
    assert streak.fail(now_s=100.0 + HELD_S) == 0.0
    assert streak.num_failures == 1


def test_attempts_that_take_long_to_fail_are_one_streak():
    streak = Streak(now_s=0.0)
    for moment_s in (1.0, 200.0, 400.0):
        streak.fail(now_s=moment_s)
    assert streak.num_failures == 3


@pytest.mark.parametrize(
    ("counts", "wanted", "instances", "target"),
    [
        ({"prefill": 2}, {0: 1, 1: 1}, PD, {0: 2, 1: 1}),
        ({"prefill": 1, "decode": 3}, {0: 2, 1: 1}, PD, {0: 1, 1: 3}),
        ({"prefill": 5}, {0: 1, 1: 2, 2: 1}, TWO_SHAPES, {0: 3, 1: 2, 2: 1}),
        ({"prefill": 1}, {0: 2, 1: 2, 2: 1}, TWO_SHAPES, {0: 1, 1: 0, 2: 1}),
    ],
)
def test_counts_of_roles_are_spread_over_shapes(counts, wanted, instances, target):
    assert spread(counts, wanted, instances) == target


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"mixed": 1}, "no instance has the role 'mixed'; this deployment has decode, prefill"),
        ({"encode": 1}, "no instance has the role 'encode'"),
        ({"prefill": 0}, "nothing could be served with prefill=0, decode=1, mixed=0"),
        ({"decode": -1}, "decode=-1 is negative"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, words):
    with pytest.raises(ScaleRefused, match=words):
        spread(counts, {0: 1, 1: 1}, PD)
