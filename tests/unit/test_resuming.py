"""When a request is asked for again and when it is given up: every token once, one end, in time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.messages import Rejection, RejectionKind
from blockferry.cluster.resuming import MOST_FRUITLESS, Lost, ResumableAnswer, Standing
from blockferry.engine.errors import BlockferryError, InstanceFailed, QueueFull, RequestRejected
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams, TokenLogprobs

TIMEOUT_S = 30.0
LOST = Lost(reason="its process has died")


def request(**sampling) -> Request:
    return Request(
        request_id="r",
        handle=1,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        arrival_s=0.0,
    )


def stats(num_output_tokens: int = 0, **costs) -> RequestStats:
    nothing = dict.fromkeys(("num_cached_tokens", "num_preemptions", "transfer_bytes", "transfer_blocks"), 0)
    nothing |= dict.fromkeys(("queued_s", "prefill_s", "transfer_s"), 0.0)
    return RequestStats(
        num_prompt_tokens=4, num_output_tokens=num_output_tokens, transfer_saved_bytes=0, **(nothing | costs)
    )


def tokens(*token_ids: int) -> RequestOutput:
    return RequestOutput(handle=1, token_ids=list(token_ids))


def cut(*token_ids: int, **costs) -> RequestOutput:
    return dataclasses.replace(
        tokens(*token_ids),
        finish_reason=FinishReason.ERROR,
        error="instance a failed",
        is_resumable=True,
        stats=stats(**costs),
    )


def whole(*token_ids: int, reason=FinishReason.LENGTH, **costs) -> RequestOutput:
    return dataclasses.replace(tokens(*token_ids), finish_reason=reason, stats=stats(8, **costs))


def rejection(kind: RejectionKind) -> Rejection:
    return Rejection(handle=1, request_id="r", kind=kind, reason=f"it is {kind}")


def submitted(timeout_s: float = TIMEOUT_S, **sampling) -> ResumableAnswer:
    answer = ResumableAnswer(request(**sampling), timeout_s=timeout_s, now_s=0.0)
    answer.submit()
    return answer


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=np.array([token_id], np.int32), logprobs=np.zeros(1, np.float32), rank=1)


def test_cut_request_comes_again_at_once_with_what_was_passed_on():
    answer = submitted()
    answer.on_output(tokens(5, 6), 0.0)
    passed = answer.on_output(cut(7), 1.0)
    assert (passed.token_ids, passed.finish_reason, passed.error) == ([7], None, "")
    assert answer.can_submit(1.0)
    assert answer.submit().output_token_ids.tolist() == [5, 6, 7]


def test_seed_is_chosen_once():
    answer = submitted()
    answer.on_lost(LOST, 0.0)
    first, second = answer.submit(), ResumableAnswer(request(), timeout_s=TIMEOUT_S, now_s=0.0).submit()
    answer.on_lost(LOST, 0.0)
    assert first.sampling.seed == answer.submit().sampling.seed != second.sampling.seed


def test_seed_that_was_given_is_kept():
    assert ResumableAnswer(request(seed=3), timeout_s=TIMEOUT_S, now_s=0.0).submit().sampling.seed == 3


def test_end_that_cannot_be_resumed_is_passed_on():
    answer = submitted()
    end = answer.on_output(dataclasses.replace(cut(5), is_resumable=False), 0.0)
    assert (end.token_ids, end.finish_reason, end.error) == ([5], FinishReason.ERROR, "instance a failed")
    assert answer.standing is Standing.ENDED


def test_pauses_grow_while_no_instance_is_there():
    answer, now_s, pauses = submitted(), 0.0, []
    for _ in range(8):
        assert answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), now_s) is None
        pauses.append(answer.act_s(is_connected=True) - now_s)
        now_s = answer.act_s(is_connected=True)
        answer.submit()
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


def test_request_that_nobody_ever_took_in_raises_when_its_time_is_over():
    answer = submitted()
    answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), 0.0)
    answer.submit()
    with pytest.raises(InstanceFailed, match="it is no_instance; nobody could take it over within 30 s"):
        answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), TIMEOUT_S)
    assert answer.standing is Standing.ENDED


def test_request_that_had_begun_ends_with_one_error_that_names_what_cut_it():
    answer = submitted()
    answer.on_output(cut(5, transfer_bytes=3), 10.0)
    answer.submit()
    assert answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), 12.0) is None
    assert answer.act_s(is_connected=False) == 40.0
    end = answer.expire()
    assert (end.token_ids, end.finish_reason) == ([], FinishReason.ERROR)
    assert end.error == "instance a failed; nobody could take it over within 30 s"
    assert end.stats.transfer_bytes == 3


def test_time_is_counted_anew_once_somebody_has_taken_it_in():
    answer = submitted()
    answer.on_output(cut(5), 0.0)
    answer.submit()
    answer.on_output(tokens(6), 29.0)
    answer.on_output(cut(), 50.0)
    assert answer.deadline_s == 80.0


def test_scheduler_that_is_lost_is_waited_for_without_a_pause():
    answer = submitted()
    assert answer.on_lost(LOST, 3.0) is None
    assert (answer.can_submit(3.0), answer.act_s(is_connected=False)) == (True, 33.0)


def test_new_request_waits_for_a_scheduler_and_says_why_it_ends():
    answer = ResumableAnswer(request(), timeout_s=TIMEOUT_S, now_s=0.0)
    answer.on_lost(LOST, 0.0)
    with pytest.raises(InstanceFailed, match="its process has died; nobody"):
        answer.expire()


def test_scheduler_that_stops_for_good_ends_the_request():
    answer = submitted()
    answer.on_output(tokens(5), 0.0)
    end = answer.on_lost(Lost(reason="maintenance", is_final=True), 0.0)
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, "maintenance")


@pytest.mark.parametrize(
    ("kind", "error"), [(RejectionKind.QUEUE_FULL, QueueFull), (RejectionKind.NEVER_FITS, RequestRejected)]
)
def test_refusal_of_a_new_request_is_raised(kind, error):
    answer = submitted()
    with pytest.raises(error):
        answer.on_rejection(rejection(kind), 0.0)
    assert answer.standing is Standing.ENDED


def test_full_queue_is_waited_for_by_a_request_that_had_been_in_one():
    answer = submitted()
    answer.on_output(cut(), 0.0)
    answer.submit()
    assert answer.on_rejection(rejection(RejectionKind.QUEUE_FULL), 0.0) is None
    assert answer.standing is Standing.WAITING


def test_request_that_fits_nowhere_else_ends_with_an_error_and_keeps_its_tokens():
    answer = submitted()
    answer.on_output(cut(5), 0.0)
    answer.submit()
    end = answer.on_rejection(rejection(RejectionKind.NEVER_FITS), 0.0)
    assert end.error == "instance a failed; it cannot go on elsewhere: it is never_fits"


def test_request_that_ends_every_instance_is_given_up():
    answer = submitted()
    answer.on_output(cut(5), 0.0)
    ends = []
    while answer.standing is not Standing.ENDED:
        answer.submit()
        ends.append(answer.on_output(cut(), 0.0))
    assert len(ends) == MOST_FRUITLESS
    assert f"{MOST_FRUITLESS} times before without a token more" in ends[-1].error


def test_abort_while_it_waits_ends_it():
    answer = submitted()
    answer.on_output(cut(5), 0.0)
    assert answer.end_aborted().finish_reason is FinishReason.ABORT
    assert answer.standing is Standing.ENDED


@pytest.mark.parametrize("move", ["cut", "lost", "no instance"])
def test_aborted_request_is_not_resumed(move):
    answer = submitted()
    answer.on_output(tokens(5), 0.0)
    answer.is_aborted = True
    end = {
        "cut": lambda: answer.on_output(cut(), 0.0),
        "lost": lambda: answer.on_lost(LOST, 0.0),
        "no instance": lambda: answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), 0.0),
    }[move]()
    assert end.finish_reason is FinishReason.ABORT


def test_without_a_time_to_resume_the_error_is_passed_on_as_it_is():
    end = submitted(timeout_s=0.0).on_output(cut(5), 0.0)
    assert (end.token_ids, end.error) == ([5], "instance a failed")
    with pytest.raises(InstanceFailed, match=r"it is no_instance$"):
        submitted(timeout_s=0.0).on_rejection(rejection(RejectionKind.NO_INSTANCE), 0.0)


def test_stats_tell_what_all_submissions_cost():
    answer = submitted()
    answer.on_output(cut(5, queued_s=1.0, transfer_bytes=100, num_cached_tokens=4), 0.0)
    answer.submit()
    end = answer.on_output(whole(6, queued_s=2.0, transfer_bytes=10, num_cached_tokens=2), 0.0)
    assert (end.stats.queued_s, end.stats.transfer_bytes, end.stats.num_cached_tokens) == (3.0, 110, 2)
    assert (end.stats.num_output_tokens, end.stats.num_resumes) == (8, 1)


def test_drafts_of_all_submissions_are_counted():
    answer = submitted()
    answer.on_output(cut(1, 2, num_drafted_tokens=6, num_accepted_tokens=1), 1.0)
    answer.submit()
    end = answer.on_output(whole(3, num_drafted_tokens=3, num_accepted_tokens=2), 2.0)
    assert (end.stats.num_drafted_tokens, end.stats.num_accepted_tokens) == (9, 3)


def test_attempts_that_nobody_took_in_are_no_resumes():
    answer = submitted()
    answer.on_output(cut(5), 0.0)
    for _ in range(3):
        answer.submit()
        answer.on_rejection(rejection(RejectionKind.NO_INSTANCE), 0.0)
    answer.submit()
    assert answer.on_output(whole(6), 0.0).stats.num_resumes == 1


def test_prompt_positions_that_were_scored_twice_are_passed_on_once():
    answer = submitted()
    entries = [logprob(token_id) for token_id in range(4)]
    answer.on_output(RequestOutput(handle=1, prompt_logprobs=entries[:2]), 0.0)
    answer.on_output(cut(), 0.0)
    answer.submit()
    again = [answer.on_output(RequestOutput(handle=1, prompt_logprobs=[entry]), 0.0) for entry in entries]
    assert [len(output.prompt_logprobs) for output in again] == [0, 0, 1, 1]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data(), num_tokens=st.integers(0, 12), timeout_s=st.sampled_from([0.0, 2.0, 30.0]))
def test_whatever_happens_every_token_is_passed_on_once_and_there_is_one_end(data, num_tokens, timeout_s):
    truth = list(range(100, 100 + num_tokens))
    answer = ResumableAnswer(request(max_tokens=num_tokens), timeout_s=timeout_s, now_s=0.0)
    passed, ends, now_s, waiting_since_s = [], [], 0.0, 0.0
    drawn, is_taken_in = 0, False
    moves = st.sampled_from(["tokens", "tokens", "end", "cut", "no_instance", "queue_full", "lost", "time", "abort"])
    while answer.standing is not Standing.ENDED:
        move = data.draw(moves)
        output = None
        try:
            if answer.standing is Standing.WAITING:
                is_connected = data.draw(st.booleans())
                now_s = max(now_s, answer.act_s(is_connected=is_connected))
                assert now_s <= waiting_since_s + timeout_s
                if move == "abort":
                    output = answer.end_aborted()
                elif is_connected and answer.can_submit(now_s):
                    drawn, is_taken_in = len(answer.submit().output_token_ids), False
                elif now_s >= answer.deadline_s:
                    output = answer.expire()
            elif move == "time":
                now_s += data.draw(st.floats(0.0, 50.0)) if is_taken_in else 0.0
            elif move == "abort":
                answer.is_aborted = True
            elif move == "lost":
                waiting_since_s = now_s
                output = answer.on_lost(LOST, now_s)
            elif move in ("no_instance", "queue_full"):
                if not is_taken_in:
                    output = answer.on_rejection(rejection(RejectionKind(move)), now_s)
            else:
                count = data.draw(st.integers(0, num_tokens - drawn)) if move != "end" else num_tokens - drawn
                new = truth[drawn : drawn + count]
                drawn, is_taken_in = drawn + count, True
                waiting_since_s = now_s
                output = answer.on_output({"tokens": tokens, "cut": cut, "end": whole}[move](*new), now_s)
        except BlockferryError:
            assert not answer.was_accepted
            assert answer.standing is Standing.ENDED
            ends.append(None)
        if output is not None:
            assert not ends, "something after the end"
            assert not output.is_resumable
            passed += output.token_ids
            ends += [output.finish_reason] if output.finish_reason is not None else []
    assert len(ends) == 1
    assert passed == truth[: len(passed)]
    assert ends[0] is not FinishReason.LENGTH or passed == truth
