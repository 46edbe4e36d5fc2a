import numpy as np
import pytest

from blockferry.connectors.base import TransferEvent, TransferMode, TransferPart, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler

BLOCKS = np.array([1, 2], np.int32)


def make_scheduler(mode=TransferMode.PUSH):
    scheduler = PdScheduler(mode=mode, transfer_timeout_s=10.0, grace_s=5.0)
    scheduler.add_instance("p0", num_ranks=2)
    scheduler.add_instance("d0", num_ranks=1)
    return scheduler


def begin(scheduler, now_s=0.0):
    part = TransferPart(src_group=0, dst_group=0, src_block_ids=BLOCKS, dst_block_ids=BLOCKS, num_tokens=32)
    return scheduler.begin([part], src_instance_id="p0", dst_instance_id="d0", now_s=now_s)


def event(command, rank=0, state=TransferState.DONE, **changes):
    values = {
        "transfer_id": command.transfer_id,
        "instance_id": command.executing_instance_id,
        "rank": rank,
        "state": state,
        "num_bytes": 100,
        "num_runs": 2,
        "duration_s": 0.5 + rank,
    }
    return TransferEvent(**(values | changes))


def test_a_push_is_done_when_every_source_rank_reported():
    scheduler = make_scheduler()
    command = begin(scheduler)
    assert command.executing_instance_id == "p0"
    assert scheduler.on_event(event(command, 0), now_s=1.0) is None
    outcome = scheduler.on_event(event(command, 1), now_s=2.0)
    assert (outcome.state, outcome.num_bytes, outcome.num_runs) == (TransferState.DONE, 200, 4)
    assert (outcome.duration_s, outcome.elapsed_s, outcome.is_quiesced) == (1.5, 2.0, True)
    assert scheduler.num_active == 0


def test_a_pull_is_done_when_every_destination_rank_reported():
    scheduler = make_scheduler(TransferMode.PULL)
    command = begin(scheduler)
    assert command.executing_instance_id == "d0"
    assert scheduler.on_event(event(command), now_s=1.0).state is TransferState.DONE


def test_one_failed_rank_fails_the_transfer_after_all_have_reported():
    scheduler = make_scheduler()
    command = begin(scheduler)
    assert scheduler.on_event(event(command, 1, TransferState.FAILED, reason="peer d0 died"), now_s=1.0) is None
    outcome = scheduler.on_event(event(command, 0, TransferState.CANCELLED), now_s=2.0)
    assert (outcome.state, outcome.reason, outcome.is_quiesced) == (TransferState.FAILED, "peer d0 died", True)


def test_a_repeated_report_counts_once():
    scheduler = make_scheduler()
    command = begin(scheduler)
    assert scheduler.on_event(event(command, 0), now_s=1.0) is None
    assert scheduler.on_event(event(command, 0), now_s=1.0) is None
    assert scheduler.num_active == 1


def test_a_silent_rank_ends_the_transfer_unquiesced_after_the_grace():
    scheduler = make_scheduler()
    begin(scheduler, now_s=100.0)
    assert scheduler.expire(now_s=114.9) == ()
    (outcome,) = scheduler.expire(now_s=115.1)
    assert (outcome.state, outcome.is_quiesced) == (TransferState.FAILED, False)
    assert scheduler.num_active == 0


def test_reports_that_come_after_the_grace_tell_that_the_transfer_has_quiesced():
    scheduler = make_scheduler()
    command = begin(scheduler, now_s=100.0)
    scheduler.expire(now_s=116.0)
    assert scheduler.command(command.transfer_id) is command  # the ranks can be asked
    assert scheduler.on_event(event(command, 0), now_s=117.0) is None
    assert scheduler.on_event(event(command, 1), now_s=118.0).is_quiesced
    assert scheduler.on_event(event(command, 1), now_s=119.0) is None


def test_a_watched_outcome_comes_again_once_its_bytes_have_landed():
    scheduler = make_scheduler()
    command = begin(scheduler)
    late = event(command, 0, TransferState.FAILED, is_quiesced=False, is_watched=True)
    scheduler.on_event(late, now_s=1.0)
    first = scheduler.on_event(event(command, 1), now_s=2.0)
    assert (first.is_quiesced, first.is_watched) == (False, True)
    assert scheduler.on_event(late, now_s=3.0) is None
    outcome = scheduler.on_event(event(command, 0, TransferState.FAILED), now_s=4.0)
    assert (outcome.state, outcome.is_quiesced, outcome.is_watched) == (TransferState.FAILED, True, False)


def test_a_watched_outcome_comes_again_when_its_connection_fails():
    scheduler = make_scheduler(TransferMode.PULL)
    command = begin(scheduler)
    late = event(command, 0, TransferState.FAILED, is_quiesced=False, is_watched=True)
    assert scheduler.on_event(late, now_s=1.0).is_watched
    lost = event(command, 0, TransferState.FAILED, is_quiesced=False)
    outcome = scheduler.on_event(lost, now_s=2.0)
    assert (outcome.is_quiesced, outcome.is_watched) == (False, False)
    assert scheduler.command(command.transfer_id) is None


def test_a_report_of_an_instance_that_does_not_execute_is_ignored():
    scheduler = make_scheduler()
    command = begin(scheduler)
    assert scheduler.on_event(event(command, instance_id="d0"), now_s=1.0) is None
    assert scheduler.command(command.transfer_id) is command


def test_an_unknown_instance_is_refused_and_nothing_begins():
    scheduler = PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=1.0)
    with pytest.raises(ValueError, match="'p0' is unknown"):
        begin(scheduler)
    assert scheduler.num_active == 0


def test_a_dropped_connection_leaves_the_outcome_unquiesced():
    scheduler = make_scheduler(TransferMode.PULL)
    command = begin(scheduler)
    report = event(command, state=TransferState.FAILED, is_quiesced=False)
    assert not scheduler.on_event(report, now_s=1.0).is_quiesced
