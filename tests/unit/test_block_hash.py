"""Block hashes: chained, whole blocks only, tagged extra keys, equal everywhere."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockferry.engine.kv.block_hash import (
    NONE_HASH,
    ExtraKey,
    ExtraKeyKind,
    RequestHashes,
    append_plain,
    hash_blocks,
    lora_key,
    salt_key,
)

TOKENS = np.arange(100, 164, dtype=np.int32)


def test_none_hash_is_a_constant_that_nodes_agree_on() -> None:
    assert NONE_HASH.hex() == "c989e947c8c5af999d30f1e9b95f14c2646cafedeb4f4269da89f08a"


def test_digest_is_the_documented_chain() -> None:
    first, second = hash_blocks(TOKENS[:9], 4)
    assert first == hashlib.blake2b(NONE_HASH + TOKENS[:4].astype("<i4").tobytes(), digest_size=28).digest()
    assert second == hashlib.blake2b(first + TOKENS[4:8].astype("<i4").tobytes(), digest_size=28).digest()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_are_hashed(num_tokens: int, num_blocks: int) -> None:
    assert len(hash_blocks(TOKENS[:num_tokens], 4)) == num_blocks


def test_changed_first_token_changes_every_digest() -> None:
    other = TOKENS.copy()
    other[0] += 1
    assert not set(hash_blocks(TOKENS, 4)) & set(hash_blocks(other, 4))


def test_changed_last_token_keeps_the_common_prefix() -> None:
    other = TOKENS.copy()
    other[-1] += 1
    left, right = hash_blocks(TOKENS, 4), hash_blocks(other, 4)
    assert left[:-1] == right[:-1]
    assert left[-1] != right[-1]


@given(cuts=st.lists(st.integers(0, 64), max_size=6), salt=st.sampled_from(["", "tenant"]))
def test_extending_in_pieces_equals_hashing_at_once(cuts: list[int], salt: str) -> None:
    hashes = RequestHashes(4, salt_key(salt))
    for cut in sorted(cuts):
        hashes.extend(TOKENS[:cut])
    hashes.extend(TOKENS)
    assert hashes.digests == hash_blocks(TOKENS, 4, extra_keys=salt_key(salt))


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_append_plain_equals_extend_where_it_is_allowed(salt: str) -> None:
    hashes = RequestHashes(4, salt_key(salt))
    assert hashes.next_plain == 0
    hashes.extend(TOKENS[:4])
    assert hashes.next_plain == 2
    append_plain([hashes.digests], [TOKENS[4:8].tobytes()])
    assert hashes.digests == hash_blocks(TOKENS[:8], 4, extra_keys=salt_key(salt))


def test_lora_sequences_never_take_the_plain_path() -> None:
    hashes = RequestHashes(4, (lora_key("adapter", max_model_len=64),))
    hashes.extend(TOKENS[:16])
    assert hashes.next_plain == 0


def test_salt_separates_sequences_through_the_chain() -> None:
    plain, salted = hash_blocks(TOKENS, 4), hash_blocks(TOKENS, 4, extra_keys=salt_key("tenant"))
    assert not set(plain) & set(salted)


def test_lora_name_never_collides_with_an_equal_salt() -> None:
    block = TOKENS[:4]
    assert hash_blocks(block, 4, extra_keys=salt_key("same")) != hash_blocks(
        block, 4, extra_keys=(lora_key("same", max_model_len=1),)
    )


def test_multimodal_key_touches_only_blocks_from_its_placeholder_on() -> None:
    image = ExtraKey(kind=ExtraKeyKind.MULTIMODAL, value=b"digest", start=6, stop=10)
    plain, pictured = hash_blocks(TOKENS, 4), hash_blocks(TOKENS, 4, extra_keys=(image,))
    assert plain[0] == pictured[0]
    assert all(left != right for left, right in zip(plain[1:], pictured[1:]))


def test_multimodal_offset_within_the_block_matters() -> None:
    early = ExtraKey(kind=ExtraKeyKind.MULTIMODAL, value=b"digest", start=1, stop=4)
    late = ExtraKey(kind=ExtraKeyKind.MULTIMODAL, value=b"digest", start=2, stop=4)
    assert hash_blocks(TOKENS[:4], 4, extra_keys=(early,)) != hash_blocks(TOKENS[:4], 4, extra_keys=(late,))


def test_values_are_length_prefixed_so_that_neighbours_cannot_merge() -> None:
    def keys(*values: bytes) -> tuple[ExtraKey, ...]:
        return tuple(ExtraKey(kind=ExtraKeyKind.SALT, value=value, start=0, stop=1) for value in values)

    assert hash_blocks(TOKENS[:4], 4, extra_keys=keys(b"ab", b"c")) != hash_blocks(
        TOKENS[:4], 4, extra_keys=keys(b"a", b"bc")
    )
