"""Streaming equals non-streaming for every way of cutting, and arguments are always JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.core import FinishReason
from agens_engine.text.detokenizer import Detokenizer
from agens_engine.text.output import Answer, Delta, OutputOptions, OutputParser, collect
from agens_engine.text.stops import StopMatcher, StopSet
from agens_engine.text.tool_calls import ToolCallParser, join_calls
from agens_engine.text.tool_schema import tool_schemas
from tests.textkit import byte_tokens, cut, load_kit, mixed_tokens, native

TOK, _ = load_kit()
SIZES = st.lists(st.integers(1, 7), max_size=6)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "weird", ["integer", "string"]])
TOOLS: list[Any] = [
    {
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "object"}, "c": {}}},
        }
    }
]
# Pieces of the call grammar, whole and broken, and text that resembles it.
FRAGMENTS = st.sampled_from(
    [
        "<function=",
        "f>",
        ">",
        "\n",
        "<parameter=",
        "a>",
        "b>",
        "c>",
        "1",
        '{"x": 1}',
        "null",
        "</parameter>",
        "</function>",
    ]
    + ["<", "</", "param", "<function=f>\n<parameter=a>\n", '"', "\\", "é🦊", "<parameter=a>\n7\n</parameter>\n", " "]
)
SOUP = st.lists(FRAGMENTS, max_size=24).map("".join)
CONTROLS = st.sampled_from(["<|think|>", "<|/think|>", "<|call|>", "<|/call|>", "<|agens_end|>", "<|image_pad|>"])
OUTPUT = st.lists(st.one_of(FRAGMENTS, CONTROLS, st.text(max_size=3)), max_size=24).map("".join)


@settings(max_examples=60)
@given(st.text(max_size=40), SIZES)
def test_detokenizer_equals_decoding_all_at_once(text: str, sizes: list[int]) -> None:
    data = text.encode("utf-8", "surrogatepass")
    check_detokenizer(data, sizes)


@settings(max_examples=60)
@given(st.binary(max_size=40), SIZES)
def test_detokenizer_equals_decoding_all_at_once_for_any_bytes(data: bytes, sizes: list[int]) -> None:
    check_detokenizer(data, sizes)


def check_detokenizer(data: bytes, sizes: list[int]) -> None:
    detokenizer = Detokenizer()
    pieces = [p.encode("latin-1") for p in cut(data.decode("latin-1"), sizes)]
    assert "".join([*map(detokenizer.push, pieces), detokenizer.finish()]) == data.decode("utf-8", "replace")


@settings(max_examples=60)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), SIZES)
def test_stops_equal_a_naive_search_and_hold_back_no_more_than_needed(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(StopSet(stops))
    seen = shown = ""
    for piece in cut(text, sizes):
        shown += matcher.feed(piece)
        seen += piece
        if matcher.hit is None:
            held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
            assert shown == seen[: len(seen) - held]
    shown += matcher.finish()
    assert (shown, matcher.hit) == naive_stop(text, stops)


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=60)
@given(SOUP, SIZES, st.sampled_from(["close", "natural", "cut"]))
def test_a1_a6_call_parser_gives_the_same_valid_json_for_every_cut(soup: str, sizes: list[int], ending: str) -> None:
    def run(pieces: list[str]) -> list[Any]:
        parser = ToolCallParser(tool_schemas(TOOLS), lambda: "id")
        deltas = [d for p in pieces for d in parser.feed(p)]
        deltas += parser.close_region() if ending == "close" else parser.finish(natural=ending == "natural")
        return join_calls(deltas)

    whole = run([soup])
    assert run(list(cut(soup, sizes))) == whole == run(list(soup))
    for call in whole:
        assert isinstance(json.loads(call["function"]["arguments"], parse_constant=bad_constant), dict)


def bad_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda s: "<" not in s)
NAMES = st.text("abcxyz_09", min_size=1, max_size=6)


@settings(max_examples=60)
@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), max_size=3), SIZES)
def test_a1_well_formed_calls_come_back_exactly(calls: list[tuple[str, dict[str, str]]], sizes: list[int]) -> None:
    text = ""
    for name, parameters in calls:
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
        text += f"\n<function={name}>\n{body}</function>\n"
    parser = ToolCallParser({}, lambda: "id")
    deltas = [d for p in cut(text, sizes) for d in parser.feed(p)] + parser.close_region()
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in join_calls(deltas)]
    expected = [(n, {k: None if v.lower() == "null" else v for k, v in p.items()}) for n, p in calls]
    assert found == expected


@settings(max_examples=60)
@given(st.text(max_size=12), TYPES)
def test_any_value_under_any_type_is_strict_json(text: str, type_name: Any) -> None:
    value = text.encode("utf-8", "replace").decode()
    schemas = {"f": {"a": {"type": type_name}}}
    parser = ToolCallParser(schemas, lambda: "id")
    deltas = [*parser.feed(f"<function=f><parameter=a>\n{value}"), *parser.close_region()]
    [call] = join_calls(deltas)
    json.loads(call["function"]["arguments"], parse_constant=bad_constant)
    call["function"]["arguments"].encode()


def parse(ids: list[int], reason: FinishReason, options: OutputOptions) -> tuple[Answer, list[Delta]]:
    parser = OutputParser(TOK, options)
    deltas: list[Delta] = []
    for token_id in ids:
        new, stopped = parser.push(token_id)
        deltas += new
        if stopped:
            break
    deltas += parser.finish(reason)
    return collect(deltas), deltas


@settings(max_examples=60)
@given(
    OUTPUT,
    st.sampled_from(["split", "content", "show"]),
    st.sampled_from(["parse", "drop", "show"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["f>", "1\n", "\n<", "é", "<|think|>", "param", "🦊"]), max_size=2),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_answers_do_not_depend_on_how_text_is_cut_into_tokens(
    text: str, reasoning: Any, calls: Any, starts: bool, inside: bool, stops: list[str], reason: FinishReason
) -> None:
    options = OutputOptions(
        reasoning=reasoning,
        calls=calls,
        tools=TOOLS,
        stops=tuple(stops),
        starts_in_reasoning=starts,
        calls_in_reasoning=inside,
        new_call_id=lambda: "id",
    )
    answer, deltas = parse(native(TOK, text), reason, options)
    assert parse(mixed_tokens(TOK, text), reason, options)[0] == answer
    for call in answer.tool_calls:
        assert isinstance(json.loads(call["function"]["arguments"], parse_constant=bad_constant), dict)
    shown = (answer.reasoning or "") + (answer.content or "")
    assert not any(c in shown for c in ("<|call|>", "<|/call|>", "<|agens_end|>", "<|image_pad|>"))
    assert all(getattr(d, "text", "x") for d in deltas)


@settings(max_examples=60)
@given(st.text(max_size=30), st.text(max_size=30))
def test_split_answer_is_the_text_around_the_marker(thought: str, content: str) -> None:
    thought, content = (s.encode("utf-8", "replace").decode() for s in (thought, content))
    ids = [*byte_tokens(TOK, thought), TOK.think_end_id, *byte_tokens(TOK, content)]
    answer, _ = parse(ids, FinishReason.STOP, OutputOptions(starts_in_reasoning=True))
    assert answer == Answer(thought or None, content or None, [])
