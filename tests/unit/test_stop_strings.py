"""Stop strings end the text wherever tokens break, and nothing past them is ever shown."""

from hypothesis import given
from hypothesis import strategies as st

from blockferry.cluster.api.stop_strings import StopMatcher


def _run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        match = matcher.push(piece)
        shown += match.text
        if match.stop is not None:
            return shown, match.stop
    return shown + matcher.flush(), None


def _by_character(stops, text):
    """The plainest reading: the first character that completes a stop string ends the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_across_pieces_is_found():
    assert _run(["STOP"], ["hello S", "TO", "P more"]) == ("hello ", "STOP")


def test_a_partial_match_is_held_back_and_released():
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("answer\nUs").text == "answer"
    assert matcher.push("e it").text == "\nUse it"


def test_a_partial_match_at_the_end_is_shown():
    assert _run(["END"], ["the EN"]) == ("the EN", None)


def test_the_stop_that_completes_first_wins():
    assert _run(["lazy dog", "fox"], ["the fox and the lazy dog"]) == ("the ", "fox")


def test_a_self_overlapping_stop_is_found():
    assert _run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_without_stops_text_passes():
    assert _run([], ["a", "b"]) == ("ab", None)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab\nc", max_size=4), max_size=12),
)
def test_the_cut_depends_on_characters_only(stops, pieces):
    shown, stop = _run(stops, pieces)
    assert (shown, stop) == _by_character(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_what_is_shown_is_always_a_prefix_of_the_result(stops, pieces):
    final = _by_character(stops, "".join(pieces))[0]
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        match = matcher.push(piece)
        shown += match.text
        assert final.startswith(shown)
        if match.stop is not None:
            break
