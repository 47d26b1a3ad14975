"""Call grammar of spec serving.md, section 4, and kind A on the text level."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from agens_engine.text.tool_calls import CallDelta, ToolCallParser, join_calls, parse_calls
from agens_engine.text.tool_schema import tool_schemas

TOOLS = [
    {"type": "function", "function": {"name": "read_pdf", "parameters": {"properties": {"page": {"type": "integer"}}}}},
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "offset": {"type": "integer"}}
            },
        },
    },
]
SCHEMAS = tool_schemas(TOOLS)
READ_PDF = "\n<function=read_pdf>\n<parameter=page>\n1\n</parameter>\n</function>\n"


def parsed(text: str, schemas: Any = SCHEMAS) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parse_calls(text, schemas)]


def streamed(pieces: list[str], *, natural: bool | None = None) -> list[dict[str, Any]]:
    """natural None: the region was closed by its marker."""
    parser = ToolCallParser(SCHEMAS, itertools.count().__str__)
    deltas: list[CallDelta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.close_region() if natural is None else parser.finish(natural=natural)
    return join_calls(deltas)


def test_a1_arguments_are_the_same_for_every_cut_in_two_and_three() -> None:
    expected = '{"page": 1}'
    for i in range(len(READ_PDF) + 1):
        for j in range(i, len(READ_PDF) + 1):
            calls = streamed([READ_PDF[:i], READ_PDF[i:j], READ_PDF[j:]])
            assert [c["function"] for c in calls] == [{"name": "read_pdf", "arguments": expected}], (i, j)


def test_a1_one_character_at_a_time() -> None:
    assert streamed(list(READ_PDF))[0]["function"]["arguments"] == '{"page": 1}'


def test_a3_first_delta_has_empty_arguments_and_no_arguments_end_as_empty_object() -> None:
    parser = ToolCallParser(SCHEMAS, lambda: "id")
    deltas = parser.feed("<function=now>") + parser.feed("\n</function>")
    assert deltas == [CallDelta(0, "id", "now", ""), CallDelta(0, None, None, "{}")]


def test_a5_required_string_and_two_optional_integers() -> None:
    full = (
        "<function=search>\n<parameter=query>\nred {fox}\n</parameter>\n<parameter=limit>\n5\n</parameter>\n"
        "<parameter=offset>\n0\n</parameter>\n</function>"
    )
    assert parsed(full) == [("search", {"query": "red {fox}", "limit": 5, "offset": 0})]
    assert parsed("<function=search>\n<parameter=query>\nx\n</parameter>\n</function>") == [("search", {"query": "x"})]


def test_a6_streamed_equals_whole_for_parallel_calls() -> None:
    text = READ_PDF + "ignored" + READ_PDF.replace("1", "2")
    whole = [c["function"] for c in parse_calls(text, SCHEMAS)]
    assert [c["function"] for c in streamed(list(text))] == whole
    assert [json.loads(f["arguments"]) for f in whole] == [{"page": 1}, {"page": 2}]


@pytest.mark.parametrize("end", range(len("<function=search>"), 110))
def test_a10_cut_by_length_gives_valid_json_of_the_complete_parameters(end: int) -> None:
    text = "<function=search>\n<parameter=query>\nfox\n</parameter>\n<parameter=limit>\n55\n</parameter>\n</function>"[
        :end
    ]
    parser = ToolCallParser(SCHEMAS)
    [call] = join_calls([*parser.feed(text), *parser.finish(natural=False)])
    arguments = json.loads(call["function"]["arguments"])
    expected: dict[str, Any] = {}
    if text.count("</parameter>") >= 1:
        expected["query"] = "fox"
    if text.count("</parameter>") >= 2:
        expected["limit"] = 55
    assert arguments == expected
    assert parser.cut_off == ("</function>" not in text)


def test_a10_cut_inside_the_name_announces_no_call() -> None:
    assert streamed(["<function=sea"], natural=False) == []


def test_ending_naturally_completes_an_open_value() -> None:
    assert (
        streamed(["<function=search><parameter=query>\nfox"], natural=True)[0]["function"]["arguments"]
        == '{"query": "fox"}'
    )


def test_one_newline_is_removed_on_each_side_and_the_rest_kept() -> None:
    text = "<function=f><parameter=code>\n\n  if a < b:\n\treturn '</p>'\n\n</parameter></function>"
    assert parsed(text) == [("f", {"code": "\n  if a < b:\n\treturn '</p>'\n"})]
    assert parsed("<function=f><parameter=a>x</parameter><parameter=b>\n</parameter></function>") == [
        ("f", {"a": "x", "b": ""})
    ]


def test_forgotten_closing_tags() -> None:
    assert parsed("<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>") == [("f", {"a": "1", "b": "2"})]
    assert parsed("<function=f>\n<parameter=a>\n1\n") == [("f", {"a": "1"})]
    assert parsed("<function=f>\n<parameter=a>\n1\n</parameter>\n<function=g>\n</function>") == [
        ("f", {"a": "1"}),
        ("g", {}),
    ]
    assert parsed("<function=f\n<parameter=a\n1\n</parameter>") == [("f", {"a": "1"})]


def test_unknown_function_is_returned_and_its_values_are_text() -> None:
    assert parsed("<function=nope><parameter=page>3</parameter></function>") == [("nope", {"page": "3"})]


def test_duplicate_parameters_last_wins() -> None:
    text = "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"
    assert parsed(text) == [("f", {"a": "2"})]


def test_first_closing_tag_ends_a_value_and_text_outside_tags_is_dropped() -> None:
    text = "noise <function=f>noise<parameter=a>x</parameter>noise</parameter></function>noise"
    assert parsed(text) == [("f", {"a": "x"})]


def test_nameless_functions_and_parameters_are_skipped() -> None:
    assert parsed("<function=></function><function=f><parameter=>x</parameter></function>") == [("f", {})]


def test_quotes_backslashes_and_unicode_survive() -> None:
    value = 'say "hi" \\ \u2028 🦊 \x00'
    assert parsed(f"<function=f><parameter=a>{value}</parameter></function>") == [("f", {"a": value})]


def test_ids_are_unique() -> None:
    ids = [c["id"] for c in parse_calls(READ_PDF * 3, SCHEMAS)]
    assert len(set(ids)) == 3 and all(i.startswith("call_") for i in ids)


def test_long_values_are_not_searched_again_for_every_piece() -> None:
    parser = ToolCallParser(SCHEMAS)
    deltas = parser.feed("<function=f><parameter=a>")
    for _ in range(20_000):
        deltas += parser.feed("x < y\n")
    deltas += parser.feed("</parameter>")
    [call] = join_calls([*deltas, *parser.close_region()])
    assert len(json.loads(call["function"]["arguments"])["a"]) == 20_000 * 6 - 1
