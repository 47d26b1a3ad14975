"""The thought / answer split on markers (kind B)."""

from __future__ import annotations

from typing import Any

from agens_engine.text.reasoning import Marker, RegionSplitter

OPEN, CLOSE, CALL, CALL_END = Marker.THINK_START, Marker.THINK_END, Marker.CALL_START, Marker.CALL_END


def run(*events: str | Marker, **options: Any) -> list[tuple[str, str]]:
    defaults: dict[str, Any] = {"reasoning": "split", "calls": "parse", "starts_in_reasoning": True}
    splitter = RegionSplitter(**(defaults | options))
    pieces = []
    for event in events:
        pieces += splitter.text(event) if isinstance(event, str) else splitter.marker(event)
    pieces += splitter.finish()
    return [(p.kind.value, p.text) for p in pieces]


def test_b1_marker_is_a_token_and_never_text() -> None:
    assert run("thought", CLOSE, "{answer") == [("reasoning", "thought"), ("content", "{answer")]


def test_b2_call_before_the_thought_is_closed_counts() -> None:
    pieces = run("I will call", CALL, "x", CALL_END, "more")
    expected = [
        ("reasoning", "I will call"),
        ("call_opened", ""),
        ("call", "x"),
        ("call_closed", ""),
        ("content", "more"),
    ]
    assert pieces == expected


def test_b2_call_inside_a_thought_can_be_left_as_thought() -> None:
    pieces = run("a", CALL, "x", CALL_END, "b", CLOSE, "answer", calls_in_reasoning=False)
    assert pieces == [("reasoning", "a"), ("reasoning", "x"), ("reasoning", "b"), ("content", "answer")]


def test_b3_spelled_out_tags_and_later_markers_do_not_reopen_the_thought() -> None:
    pieces = run("<|/think|>", "t", CLOSE, "<|think|> is one", OPEN, " tag", OPEN, CLOSE, ".")
    assert pieces[:2] == [("reasoning", "<|/think|>"), ("reasoning", "t")]
    assert "".join(t for k, t in pieces if k == "content") == "<|think|> is one tag."


def test_b5_white_space_around_calls_is_not_content() -> None:
    pieces = run("t", CLOSE, "\n", "\n", CALL, "x", CALL_END, "\n", CALL, "y", CALL_END, "\n")
    assert [k for k, _ in pieces] == [
        "reasoning",
        "call_opened",
        "call",
        "call_closed",
        "call_opened",
        "call",
        "call_closed",
    ]


def test_leading_white_space_of_an_answer_is_kept() -> None:
    assert run("t", CLOSE, "\n", "\nyes\n") == [("reasoning", "t"), ("content", "\n\nyes\n")]
    assert run("t", CLOSE, "\n") == [("reasoning", "t"), ("content", "\n")]


def test_leading_think_marker_is_stripped_or_opens_the_thought() -> None:
    assert run(OPEN, "t", CLOSE, "a") == [("reasoning", "t"), ("content", "a")]
    assert run("\n", OPEN, "t", CLOSE, "a", starts_in_reasoning=False) == [("reasoning", "t"), ("content", "a")]
    assert run("a", OPEN, "b", starts_in_reasoning=False) == [("content", "a"), ("content", "b")]


def test_thinking_off_makes_everything_content() -> None:
    pieces = run(OPEN, "t", CLOSE, "a", reasoning="content", starts_in_reasoning=False)
    assert pieces == [("content", "t"), ("content", "a")]


def test_nothing_closed_means_all_is_thought() -> None:
    assert run("a", "b") == [("reasoning", "a"), ("reasoning", "b")]


def test_a8_dropped_calls_leave_no_trace() -> None:
    assert run("t", CLOSE, "a", CALL, "x", CALL_END, "b", calls="drop") == [
        ("reasoning", "t"),
        ("content", "a"),
        ("content", "b"),
    ]


def test_call_opened_twice_closes_the_first() -> None:
    pieces = run(CLOSE, CALL, "x", CALL, "y", CALL_END)
    assert [k for k, _ in pieces] == ["call_opened", "call", "call_closed", "call_opened", "call", "call_closed"]


def test_stray_end_markers_are_dropped() -> None:
    assert run(CLOSE, "a", CLOSE, "b", CALL_END, "c") == [("content", "a"), ("content", "b"), ("content", "c")]
