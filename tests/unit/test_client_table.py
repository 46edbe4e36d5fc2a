"""Whose request is whose, and how many each instance has."""

from blockferry.cluster.client_table import ClientTable
from blockferry.engine.scheduler.outputs import Route

ROUTE = Route(prefill="prefill-0", decode="decode-0")


def test_a_request_counts_on_both_its_instances_until_it_is_closed():
    table = ClientTable()
    handles = [table.open(b"client", number, ROUTE) for number in range(2)]
    assert [table.num_assigned(one) for one in ("prefill-0", "decode-0", "decode-1")] == [2, 2, 0]
    table.close(handles[0])
    assert table.num_assigned("prefill-0") == 1


def test_a_mixed_instance_has_a_request_once():
    table = ClientTable()
    table.open(b"client", 1, Route(prefill="mixed-0", decode="mixed-0"))
    assert table.num_assigned("mixed-0") == 1


def test_nothing_is_kept_of_instances_whose_requests_have_ended():
    table = ClientTable()
    for number in range(3):
        table.close(table.open(b"client", number, ROUTE))
    assert table._num_assigned == {}


def test_several_tokens_of_a_request_are_gathered_in_their_order():
    table = ClientTable()
    first, second = (table.open(b"client", number, ROUTE) for number in (7, 8))
    table.tokens([first, first, second, first], [1, 2, 3, 4])
    batch = table.take_batches()[b"client"]
    assert (batch.handles, batch.token_ids) == ([7, 7, 8, 7], [1, 2, 3, 4])
