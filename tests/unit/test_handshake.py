import dataclasses

import msgpack
import pytest

from blockferry.connectors.base import ContentKind, HandshakeRefused, PoolEndpoint, PoolLayout, Strides
from blockferry.connectors.handshake import (
    check_compatible,
    check_coverage,
    decode_endpoint,
    encode_endpoint,
    local_host_id,
)


def make_endpoint(instance_id="p0", **changes):
    layout = {
        "order": "BHLNC",
        "num_blocks": 8,
        "block_size": 16,
        "layer_ids": (0, 1),
        "head_start": 0,
        "num_heads": 2,
        "content_bytes": 256,
        "dtype": "bfloat16",
    }
    fields = {field.name for field in dataclasses.fields(PoolLayout)}
    layout |= {key: changes.pop(key) for key in list(changes) if key in fields}
    values = {
        "instance_id": instance_id,
        "tp_rank": 0,
        "pp_rank": 0,
        "model_fingerprint": "m1",
        "layouts": (PoolLayout(**layout),),
        "transport": "ucx",
        "host_id": "h",
        "address": b"\x00\xffaddress",
        "region": b"key",
    }
    return PoolEndpoint(**(values | changes))


def test_endpoint_survives_the_wire():
    endpoint = make_endpoint()
    assert decode_endpoint(encode_endpoint(endpoint)) == endpoint


def test_layouts_of_several_groups_survive_the_wire():
    (layout,) = make_endpoint().layouts
    state = dataclasses.replace(
        layout,
        group=1,
        layer_ids=(7,),
        content=ContentKind.STATE,
        field="conv.x",
        num_copies=2,
        copy=1,
        strides=Strides(4, 3, 2, 1),
    )
    endpoint = make_endpoint(layouts=(layout, state))
    again = decode_endpoint(encode_endpoint(endpoint))
    assert again == endpoint
    assert again.layouts[1].content is ContentKind.STATE
    assert again.layouts[1].strides.token == 1


def test_another_version_is_refused():
    data = msgpack.packb([99, dataclasses.asdict(make_endpoint())])
    with pytest.raises(HandshakeRefused, match="version 99"):
        decode_endpoint(data)


@pytest.mark.parametrize(
    "data", [b"", b"garbage", msgpack.packb([2, {"layouts": [{}]}]), msgpack.packb([2, {}]), msgpack.packb(3)]
)
def test_bytes_that_are_no_handshake_are_refused(data):
    with pytest.raises(HandshakeRefused):
        decode_endpoint(data)


@pytest.mark.parametrize(
    "change",
    [
        {"transport": "loopback"},
        {"model_fingerprint": "m2"},
        {"dtype": "float32"},
        {"content_bytes": 128},
        {"order": "BHL"},
        {"content": ContentKind.LATENT},
    ],
)
def test_a_difference_in_meaning_is_refused_by_name(change):
    with pytest.raises(HandshakeRefused, match=next(iter(change))):
        check_compatible(make_endpoint("p0"), make_endpoint("d0", **change))


def test_block_size_order_groups_and_parallelism_may_differ():
    check_compatible(
        make_endpoint("p0"),
        make_endpoint("d0", group=1, block_size=32, order="LBNHC", num_heads=1, head_start=1, layer_ids=(1,)),
    )


def test_units_of_a_field_that_mean_something_else_are_refused():
    state = {"content": ContentKind.STATE, "field": "conv.x"}
    with pytest.raises(HandshakeRefused, match="content_bytes=128"):
        check_compatible(make_endpoint("p0", **state), make_endpoint("d0", **state, content_bytes=128))


def test_fields_of_a_state_need_not_agree_with_each_other():
    check_compatible(
        make_endpoint("p0", content=ContentKind.STATE, field="conv.x"),
        make_endpoint("d0", content=ContentKind.STATE, field="conv.b", content_bytes=128),
    )


def test_a_missing_field_is_refused_by_name():
    own, peer = (make_endpoint(name, field=field) for name, field in (("p0", "conv.x"), ("d0", "conv.b")))
    with pytest.raises(HandshakeRefused, match=r"layer_ids \[0, 1\] .* \(layer 0 lacks conv.x unit 0\)"):
        check_coverage(own, [peer])


def test_a_missing_head_between_others_is_refused_by_name():
    peers = [make_endpoint("d0", head_start=head, num_heads=1) for head in (0, 2)]
    with pytest.raises(HandshakeRefused, match=r"\(layer 0 lacks KV head 1\)"):
        check_coverage(make_endpoint("p0", num_heads=3), peers)


def test_a_missing_copy_is_refused():
    own, peer = make_endpoint("p0", tp_rank=1), make_endpoint("d0", num_copies=2, copy=0)
    with pytest.raises(HandshakeRefused, match="layer 0 lacks KV head 0"):
        check_coverage(own, [peer])


def test_copies_are_the_same_in_any_number():
    check_compatible(
        *(make_endpoint(name, content=ContentKind.LATENT, num_copies=size) for name, size in (("p0", 1), ("d0", 2)))
    )


def test_layers_that_only_one_side_stores_need_not_agree():
    check_compatible(make_endpoint("p0"), make_endpoint("d0", layer_ids=(2, 3), group=1, content_bytes=128))


def test_layers_in_other_groups_are_covered():
    check_coverage(make_endpoint("p0"), [make_endpoint("d0", group=1)])


def test_an_instance_is_no_peer_of_itself():
    with pytest.raises(HandshakeRefused, match="instance_id"):
        check_compatible(make_endpoint("p0"), make_endpoint("p0"))


def test_ranks_cover_layers_and_heads_together():
    peers = [
        make_endpoint("d0", layer_ids=(layer,), head_start=head, num_heads=1) for layer in (0, 1) for head in (0, 1)
    ]
    check_coverage(make_endpoint("p0"), peers)


def test_a_missing_layer_is_refused_by_name():
    with pytest.raises(HandshakeRefused, match=r"layer_ids \[1\]"):
        check_coverage(make_endpoint("p0"), [make_endpoint("d0", layer_ids=(0,))])


def test_the_host_id_is_stable_within_a_process():
    assert local_host_id() == local_host_id()
