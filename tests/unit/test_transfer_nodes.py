"""Which node of a cluster a user means."""

import pytest

from blockferry.cluster.bench.transfer_actors import ClusterNode, find_node

NODES = [
    ClusterNode(node_id="aaaa1111", hostname="w1", address="10.0.0.1"),
    ClusterNode(node_id="aaaa2222", hostname="w2", address="10.0.0.2"),
    ClusterNode(node_id="bbbb3333", hostname="w2", address="10.0.0.3"),
]


@pytest.mark.parametrize("wanted", ["w1", "10.0.0.1", "aaaa1", "AAAA1111"])
def test_a_node_is_found_by_hostname_address_or_beginning_of_its_id(wanted):
    assert find_node(NODES, wanted, option="--src") is NODES[0]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("w3", "--src='w3' is no node of this cluster"),
        ("bbb", "'bbb' is no node"),  # too short for an id
        ("", "'' is no node"),
        ("aaaa", "'aaaa' means 2 nodes"),
        ("w2", "'w2' means 2 nodes"),
    ],
)
def test_an_unknown_or_ambiguous_node_is_refused_with_the_list(wanted, words):
    with pytest.raises(ValueError, match=words) as refusal:
        find_node(NODES, wanted, option="--src")
    assert "w1 (10.0.0.1, id aaaa1111)" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
