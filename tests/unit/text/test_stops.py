"""Stop strings (cases C3-C6) and the `stop` field."""

from __future__ import annotations

from typing import Any

import pytest

from agens_engine.errors import RequestError
from agens_engine.text.stops import MAX_STOP_STRINGS, StopMatcher, StopSet, parse_stops


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopSet(stops))
    shown = [matcher.feed(p) for p in pieces]
    return [*shown, matcher.finish()], matcher.hit


def test_c3_nothing_of_the_stop_string_is_sent() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"]) == (["ABC", "", "", "", "", "", ""], "DEFGHIJ")


def test_c3_a_false_start_is_released() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "x"]) == (["ABC", "", "", "DEFGx", ""], None)


def test_c4_stop_over_two_tokens() -> None:
    assert run(["beta gamma"], ["alpha ", "beta", " gamma", " delta"]) == (["alpha ", "", "", "", ""], "beta gamma")


def test_c5_match_that_starts_inside_a_token() -> None:
    shown, hit = run(["own fox"], ["The quick br", "own", " fox"])
    assert ("".join(shown), hit) == ("The quick br", "own fox")
    shown, hit = run(["own fox"], ["The quick", " brown", " fox jumps"])
    assert ("".join(shown), hit) == ("The quick br", "own fox")


def test_c6_text_before_the_stop_in_the_same_token_is_kept() -> None:
    assert run(["\n"], ["Why", "?\n"]) == (["Why", "?", ""], "\n")


def test_the_first_match_wins_and_of_two_that_end_together_the_longer() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa", ""], "bc")
    assert run(["c", "abc"], ["xabc"]) == (["x", ""], "abc")


def test_held_text_is_as_short_as_possible() -> None:
    shown, hit = run(["aab"], ["aaa", "a"])
    assert shown == ["a", "a", "aa"] and hit is None


def test_matches_do_not_reach_across_runs() -> None:
    matcher = StopMatcher(StopSet(["ab"]))
    assert (matcher.feed("xa"), matcher.finish(), matcher.feed("b")) == ("x", "a", "b")
    assert matcher.hit is None


@pytest.mark.parametrize(("value", "expected"), [(None, ()), ("x", ("x",)), (["x", "y", "x"], ("x", "y")), ([], ())])
def test_parse_stops(value: Any, expected: tuple[str, ...]) -> None:
    assert parse_stops(value) == expected


@pytest.mark.parametrize("value", ["", ["a", ""], 3, [3], {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1)])
def test_parse_stops_refuses(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_stops(value)
    assert caught.value.param == "stop"
