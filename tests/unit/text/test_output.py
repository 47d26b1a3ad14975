"""Whole answers token by token: kinds A, B and C through the OutputParser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agens_engine.core import FinishReason, OutputWatch
from agens_engine.text.output import (
    Answer,
    ContentDelta,
    Delta,
    OutputOptions,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
    collect,
)
from tests.textkit import byte_tokens, load_kit, mixed_tokens, native

TOK, _ = load_kit()
TOOLS = [
    {"type": "function", "function": {"name": "read_pdf", "parameters": {"properties": {"page": {"type": "integer"}}}}}
]
CALL = "<|call|>\n<function=read_pdf>\n<parameter=page>\n1\n</parameter>\n</function>\n<|/call|>"


def stream(
    ids: list[int], *, reason: FinishReason = FinishReason.STOP, **options: Any
) -> tuple[list[Delta], OutputParser, int]:
    """Deltas, the parser, and how many tokens were taken before it said stop."""
    defaults: dict[str, Any] = {"tools": TOOLS, "starts_in_reasoning": True}
    parser = OutputParser(TOK, OutputOptions(**(defaults | options)))
    deltas: list[Delta] = []
    taken = 0
    for token_id in ids:
        new, stopped = parser.push(token_id)
        deltas += new
        taken += 1
        if stopped:
            break
    deltas += parser.finish(reason)
    return deltas, parser, taken


def answer(text: str, **options: Any) -> Answer:
    """The answer for `text`; the native tokens and single bytes must agree."""
    coarse = collect(stream(native(TOK, text), **options)[0])
    fine = collect(stream(mixed_tokens(TOK, text), **options)[0])
    assert strip_ids(coarse) == strip_ids(fine)
    return coarse


def strip_ids(found: Answer) -> tuple[str | None, str | None, list[Any]]:
    return found.reasoning, found.content, [c["function"] for c in found.tool_calls]


def test_a1_call_arguments_are_valid_for_any_tokens() -> None:
    found = answer("t<|/think|>" + CALL + "<|agens_end|>")
    assert strip_ids(found) == ("t", None, [{"name": "read_pdf", "arguments": '{"page": 1}'}])
    assert found.tool_calls[0]["id"].startswith("call_") and found.tool_calls[0]["type"] == "function"


def test_a3_first_delta_has_name_id_and_empty_arguments() -> None:
    deltas, parser, _ = stream(native(TOK, "<|/think|><|call|><function=f></function><|/call|>"))
    [first, second] = [d for d in deltas if isinstance(d, ToolCallDelta)]
    assert (first.index, first.name, first.arguments, bool(first.id)) == (0, "f", "", True)
    assert second == ToolCallDelta(0, None, None, "{}") and parser.num_calls == 1


def test_a8_calls_are_suppressed_when_tools_are_off() -> None:
    assert answer("t<|/think|>Plain. " + CALL + "<|agens_end|>", calls="drop") == Answer("t", "Plain. ", [])


def test_a10_call_cut_by_length_keeps_complete_parameters_and_says_so() -> None:
    text = "<|/think|>" + CALL.split("</parameter>")[0].replace("\n1", "\n12")
    deltas, parser, _ = stream(native(TOK, text), reason=FinishReason.LENGTH)
    assert parser.call_cut_off
    assert collect(deltas).tool_calls[0]["function"] == {"name": "read_pdf", "arguments": "{}"}
    deltas, parser, _ = stream(native(TOK, text))
    assert not parser.call_cut_off
    assert collect(deltas).tool_calls[0]["function"]["arguments"] == '{"page": 12}'


def test_b1_marker_never_leaks_and_imitations_are_text() -> None:
    ids = [*native(TOK, "th"), *byte_tokens(TOK, "<|/think|>{"), TOK.think_end_id, *native(TOK, "{x")]
    assert collect(stream(ids)[0]) == Answer("th<|/think|>{", "{x", [])


def test_b2_call_before_the_end_of_thought() -> None:
    found = answer("I will read it." + CALL + "<|agens_end|>")
    assert (found.reasoning, found.content, len(found.tool_calls)) == ("I will read it.", None, 1)
    kept = answer("I will read it." + CALL + "x<|/think|>y", calls_in_reasoning=False)
    assert kept.tool_calls == [] and kept.content == "y" and kept.reasoning is not None
    assert kept.reasoning.endswith("</function>\nx")


def test_b3_tags_named_in_the_answer_stay_there() -> None:
    ids = [*native(TOK, "t<|/think|>"), *byte_tokens(TOK, "1. <|think|> 2. <think> 3. <|/think|>")]
    assert collect(stream(ids)[0]) == Answer("t", "1. <|think|> 2. <think> 3. <|/think|>", [])


def test_b5_thought_and_call_without_content() -> None:
    found = answer("why<|/think|>\n\n" + CALL + "\n" + CALL + "\n<|agens_end|>")
    assert (found.reasoning, found.content, len(found.tool_calls)) == ("why", None, 2)


def test_b6_tag_stays_visible_when_nobody_splits() -> None:
    found = answer("thought<|/think|>answer" + CALL + "<|agens_end|>", reasoning="show")
    assert (found.reasoning, found.content, len(found.tool_calls)) == (None, "thought<|/think|>answer", 1)


@pytest.mark.parametrize("stop", ["zzz", "<|/thinking", "</", "answers"])
def test_b8_stop_strings_do_not_disturb_markers(stop: str) -> None:
    assert answer("thought<|/think|>answer<|agens_end|>", stops=(stop,)) == Answer("thought", "answer", [])


def test_b8_no_stop_string_reaches_across_a_marker() -> None:
    assert answer("ab<|/think|>cd", stops=("bc",)) == Answer("ab", "cd", [])


def test_thinking_off_is_all_content_and_unfinished_thought_is_all_thought() -> None:
    assert answer("x<|/think|>y", reasoning="content", starts_in_reasoning=False) == Answer(None, "xy", [])
    assert answer("only thought", reason=FinishReason.LENGTH) == Answer("only thought", None, [])


def test_c1_emoji_over_tokens_is_never_broken_and_its_half_is_one_replacement() -> None:
    ids = byte_tokens(TOK, "ok 🦊")
    deltas, _, _ = stream(ids, starts_in_reasoning=False)
    assert all("\ufffd" not in d.text for d in deltas if isinstance(d, ContentDelta))
    assert collect(deltas).content == "ok 🦊"
    for cut in (1, 2, 3):
        assert collect(stream(ids[:-cut], starts_in_reasoning=False)[0]).content == "ok \ufffd"
    assert (
        collect(stream([*ids[:-1], TOK.think_start_id, *native(TOK, "x")], starts_in_reasoning=False)[0]).content
        == "ok \ufffdx"
    )


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xABCDEFGHIJK", "DEFGHIJ", "xABC"),
        ("alpha beta gamma delta", "beta gamma", "alpha "),
        ("The quick brown fox jumps", "own fox", "The quick br"),
        ("Why?\nBecause", "\n", "Why?"),
    ],
)
def test_c3_c4_c5_c6_c10_text_ends_exactly_before_the_stop(text: str, stop: str, expected: str) -> None:
    found = answer(text + "<|agens_end|>", stops=(stop,), starts_in_reasoning=False)
    assert found.content == expected
    kept = answer(text + "<|agens_end|>", stops=(stop,), starts_in_reasoning=False, include_stop=True)
    assert kept.content == expected + stop


def test_c10_generation_ends_with_the_token_that_completes_the_stop() -> None:
    ids = byte_tokens(TOK, "one two three")
    deltas, parser, taken = stream(ids, stops=("two",), starts_in_reasoning=False)
    assert (collect(deltas).content, taken, parser.stop_hit) == ("one ", len("one two"), "two")
    assert parser.push(ids[0]) == ([], True) and parser.finish(FinishReason.STOP) == []


def test_c9_a_stop_that_spells_a_control_token_is_a_stop_token() -> None:
    ids = native(TOK, "t<|/think|>never")
    deltas, parser, taken = stream(ids, stops=("<|/think|>",))
    assert (collect(deltas), taken) == (Answer("t", None, []), ids.index(TOK.think_end_id) + 1)
    assert parser.stop_token_ids == {TOK.think_end_id} and parser.stop_hit == "<|/think|>"
    spelled = [*native(TOK, "t"), *byte_tokens(TOK, "<|/think|>never")]
    assert collect(stream(spelled, stops=("<|/think|>",))[0]) == Answer("t", None, [])


def test_c9_stop_token_while_tags_are_shown() -> None:
    parser = OutputParser(TOK, OutputOptions.plain(stops=("<|/think|>",)))
    seen = [parser.push(i) for i in native(TOK, "t<|/think|>")]
    assert [d for deltas, _ in seen for d in deltas] == [ContentDelta("t")] and seen[-1][1]


def test_held_text_is_released_when_the_answer_ends() -> None:
    assert answer("abc DEF", stops=("DEFG",), starts_in_reasoning=False).content == "abc DEF"
    assert answer("abc DEF<|agens_end|>", stops=("DEFG",), reason=FinishReason.LENGTH).reasoning == "abc DEF"


def test_a_stop_inside_a_call_cuts_it() -> None:
    deltas, parser, _ = stream(native(TOK, "<|/think|>" + CALL), stops=("1",))
    [call] = collect(deltas).tool_calls
    assert json.loads(call["function"]["arguments"]) == {} and parser.call_cut_off


def test_plain_mode_is_one_text_without_control_tokens() -> None:
    parser: OutputWatch = OutputParser(TOK, OutputOptions.plain())
    text = " a<|think|>b<|/think|>c" + CALL + "<|vision_start|><|agens_end|>"
    deltas = [d for i in native(TOK, text) for d in parser.push(i)[0]] + parser.finish(FinishReason.STOP)
    inner = CALL.removeprefix("<|call|>").removesuffix("<|/call|>")
    assert collect(deltas) == Answer(None, " a<|think|>b<|/think|>c" + inner, [])


def test_control_tokens_are_never_visible_and_streams_have_no_empty_deltas() -> None:
    text = "a<|endoftext|>b<|image_pad|><|/think|>c<|result|>d" + CALL + "<|agens_end|>e"
    deltas, _, _ = stream(native(TOK, text))
    found = collect(deltas)
    assert (found.reasoning, found.content) == ("ab", "cde")
    assert all(d.text for d in deltas if isinstance(d, ReasoningDelta | ContentDelta))


def test_first_text_arrives_with_its_token() -> None:
    parser = OutputParser(TOK, OutputOptions(starts_in_reasoning=True, stops=("zzz",)))
    [token_id] = byte_tokens(TOK, "a")
    assert parser.push(token_id) == ([ReasoningDelta("a")], False) and parser.in_reasoning
    assert parser.push(TOK.think_end_id) == ([], False) and not parser.in_reasoning
    assert parser.push(token_id) == ([ContentDelta("a")], False)
