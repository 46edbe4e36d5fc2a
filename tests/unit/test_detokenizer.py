"""Pieces of text, joined, are the text: nothing split, lost or shown twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers

from blockferry.cluster.api.detokenizer import MAX_HELD_TOKENS

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40)
EMOJI = st.lists(st.sampled_from(["😀", "👩‍👩‍👧", "你好", "é", " ", "the", "\n", "🇫🇷"]), max_size=12).map("".join)


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request):
    return getattr(tiny_tokenizers, request.param)()


def _pieces(tokenizer, ids, context=()):
    detokenizer = tokenizer.detokenizer(context, skip_special_tokens=True)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=UNICODE | EMOJI)
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_full_decode(kind, text):
    tokenizer = getattr(tiny_tokenizers, kind)()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 399), max_size=40))
@settings(max_examples=200, deadline=None)
def test_arbitrary_byte_level_tokens_decode_like_the_whole(ids):
    tokenizer = tiny_tokenizers.byte_level()
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_of_many_tokens_appears_once_and_whole(tokenizer):
    ids = tokenizer.encode("a👩‍👩‍👧b", add_special_tokens=False)
    shown = [piece for piece in _pieces(tokenizer, ids) if piece]
    assert "".join(shown).strip() == "a👩‍👩‍👧b"
    assert len(ids) > len(shown)


def test_text_that_continues_a_prompt_keeps_its_space(tokenizer):
    prompt = tokenizer.encode("for", add_special_tokens=False)
    both = tokenizer.encode("for the", add_special_tokens=False)
    assert both[: len(prompt)] == prompt
    assert "".join(_pieces(tokenizer, both[len(prompt) :], context=prompt)) == " the"


def test_a_character_begun_in_the_prompt_is_finished_in_the_output():
    tokenizer = tiny_tokenizers.byte_level()
    ids = [tokenizer.encode("\x00", add_special_tokens=False)[0] for _ in range(3)]
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.num_tokens)}
    emoji = [by_byte[bytes([byte])] for byte in "😀".encode()]
    assert "".join(_pieces(tokenizer, emoji[2:], context=[*ids, *emoji[:2]])) == "😀"


def test_an_unfinished_character_ends_as_a_replacement(tokenizer):
    ids = tokenizer.encode("ok😎", add_special_tokens=False)[:-1]
    assert "".join(_pieces(tokenizer, ids)).lstrip().startswith("ok\ufffd")


def test_special_tokens_are_skipped_or_shown():
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("hi<|im_end|>you", add_special_tokens=False)
    assert "".join(_pieces(tokenizer, ids)) == "hiyou"
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    assert "".join(detokenizer.push(token_id) for token_id in ids) == "hi<|im_end|>you"


def test_endless_broken_bytes_are_not_held_back_for_ever():
    tokenizer = tiny_tokenizers.byte_fallback()
    broken = 3 + 0x80  # <0x80>, a continuation byte
    pieces = _pieces(tokenizer, [broken] * (3 * MAX_HELD_TOKENS))
    assert any(pieces[: MAX_HELD_TOKENS + 1])


def test_ids_past_the_vocabulary_show_nothing(tokenizer):
    assert _pieces(tokenizer, [tokenizer.num_tokens + 5]) == ["", ""]
