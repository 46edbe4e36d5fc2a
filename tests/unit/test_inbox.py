"""How a batch of the scheduler is taken apart into what each request got."""

import numpy as np

from blockferry.cluster.inbox import outputs_of
from blockferry.cluster.messages import HandleLogprobs, OutputBatch
from blockferry.engine.request import TokenLogprobs
from blockferry.engine.wire import RowLogprobs


def logprobs(handle: int, *token_ids: int) -> HandleLogprobs:
    entries = tuple(
        TokenLogprobs(token_ids=np.array([token_id], np.int32), logprobs=np.zeros(1, np.float32), rank=1)
        for token_id in token_ids
    )
    return HandleLogprobs(
        handle=handle, logprobs=RowLogprobs(row=0, first_position=9, is_prompt=False, entries=entries)
    )


def test_several_tokens_of_a_request_become_one_output_in_their_order():
    first, second = outputs_of(OutputBatch(handles=[7, 7, 8, 7], token_ids=[1, 2, 3, 4]))
    assert (first.handle, first.token_ids) == (7, [1, 2, 4])
    assert (second.handle, second.token_ids) == (8, [3])


def test_each_of_several_tokens_has_its_log_probabilities():
    batch = OutputBatch(handles=[7, 7], token_ids=[1, 2], logprobs=[logprobs(7, 1, 2)])
    (output,) = outputs_of(batch)
    assert [int(entry.token_ids[0]) for entry in output.logprobs] == output.token_ids
