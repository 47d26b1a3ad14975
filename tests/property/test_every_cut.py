"""Every sample answer cut at every byte and at every pair of bytes: the pieces say what the whole says (cases A1, A2,
A6, B1, B8, C1, C5).

A piece is one token whose bytes are whatever lies between two cuts, so that characters, tags, stop strings and JSON are
cut in all places. Control tokens cannot be cut: they are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from agens_engine.core import FinishReason
from agens_engine.text.output import Answer, OutputOptions, OutputParser, collect
from agens_engine.text.tool_calls import parse_calls
from agens_engine.text.tool_schema import tool_schemas
from tests.textkit import load_kit, mixed_tokens

TOKENIZER, _ = load_kit()
PROPERTIES = {
    "page": {"type": "integer"},
    "note": {"type": "string"},
    "body": {"type": "object"},
    "list": {"type": "array"},
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"properties": PROPERTIES}}}]


def call(**texts: str) -> str:
    inner = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<|call|>\n<function=read>\n{inner}</function>\n<|/call|>"


@dataclass(frozen=True)
class Sample:
    said: str
    reason: FinishReason = FinishReason.STOP
    stops: tuple[str, ...] = ()


SAMPLES = {
    "A1": Sample("<|/think|>" + call(page="1")),
    "A6_two_calls": Sample("hm<|/think|>Look.\n" + call(page="1") + "\n" + call(note='a "b" \\ {')),
    "A10_cut": Sample(call(page="1", note="never finished")[:-30], FinishReason.LENGTH),
    "B1_B3_imitations": Sample("a </thin b</think> <think>{<|/think|><think>x</think>"),
    "B2_call_in_thought": Sample("I need it." + call(list="[1, 2]")),
    "B8_C5_stop": Sample("hm<|/think|>The quick brown fox", stops=("own fox", "zebra")),
    "C1_characters": Sample("Grüße 🦊<|/think|>東京 🦊🦊 é"),
    "json_with_tags": Sample("<|/think|>" + call(body='{"html": "<b></parameter></function>\\"<parameter=x>"}')),
    "json_never_closed": Sample("<|/think|>" + call(body='{"a": "x}', page="7")),
    "json_as_python": Sample("<|/think|>" + call(body="{'it': 'say \"hi'}", list="['a']")),
}


class PieceTokenizer:
    """The kit's tokenizer with tokens of any bytes, numbered upwards from `first`."""

    first = 10**6

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def piece(self, data: bytes) -> int:
        self._pieces.append(data)
        return self.first + len(self._pieces) - 1

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id - self.first] if token_id >= self.first else TOKENIZER.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id < self.first and TOKENIZER.is_special(token_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def tokens(units: list[int], cuts: Iterable[int], tokenizer: PieceTokenizer) -> Iterator[int]:
    """The sample's bytes and control tokens, bytes joined to one token up to the next cut or control token."""
    wanted, held = set(cuts), b""
    for index, unit in enumerate(units):
        if held and (index in wanted or TOKENIZER.is_special(unit)):
            yield tokenizer.piece(held)
            held = b""
        if TOKENIZER.is_special(unit):
            yield unit
        else:
            held += TOKENIZER.token_bytes(unit)
    if held:
        yield tokenizer.piece(held)


def read(sample: Sample, units: list[int], cuts: Iterable[int]) -> tuple[Any, ...]:
    tokenizer = PieceTokenizer()
    options = OutputOptions(tools=TOOLS, stops=sample.stops, starts_in_reasoning=True)
    parser = OutputParser(tokenizer, options)  # type: ignore[arg-type]
    deltas = []
    for token in tokens(units, cuts, tokenizer):
        new, stopped = parser.push(token)
        deltas += new
        if stopped:
            break
    deltas += parser.finish(sample.reason)
    return *without_ids(collect(deltas)), parser.stop_hit, parser.call_cut_off


def without_ids(answer: Answer) -> tuple[Any, ...]:
    calls = [call["function"] for call in answer.tool_calls]
    for function in calls:
        json.loads(function["arguments"])
    return answer.reasoning, answer.content, calls


@pytest.mark.parametrize("name", SAMPLES)
def test_A1_A2_A6_B1_B8_C1_C5_every_cut_in_two(name: str) -> None:
    sample = SAMPLES[name]
    units = mixed_tokens(TOKENIZER, sample.said)
    whole = read(sample, units, ())
    assert read(sample, units, range(len(units))) == whole  # byte by byte
    for cut in range(1, len(units)):
        assert read(sample, units, [cut]) == whole, cut


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_A1_A2_A6_B1_B8_C1_C5_every_cut_in_three(name: str) -> None:
    sample = SAMPLES[name]
    units = mixed_tokens(TOKENIZER, sample.said)
    whole = read(sample, units, ())
    for cuts in combinations(range(1, len(units)), 2):
        assert read(sample, units, cuts) == whole, cuts


def test_the_samples_say_what_they_are_for() -> None:
    found = {name: read(sample, mixed_tokens(TOKENIZER, sample.said), ()) for name, sample in SAMPLES.items()}
    arguments = {name: [json.loads(c["arguments"]) for c in calls] for name, (_, _, calls, _, _) in found.items()}
    assert arguments["A1"] == [{"page": 1}]
    assert arguments["A6_two_calls"] == [{"page": 1}, {"note": 'a "b" \\ {'}]
    assert arguments["A10_cut"] == [{"page": 1}] and found["A10_cut"][4]
    assert found["B1_B3_imitations"][:2] == ("a </thin b</think> <think>{", "<think>x</think>")
    assert found["B2_call_in_thought"][0] == "I need it." and arguments["B2_call_in_thought"] == [{"list": [1, 2]}]
    assert found["B8_C5_stop"][1] == "The quick br" and found["B8_C5_stop"][3] == "own fox"
    assert found["C1_characters"][:2] == ("Grüße 🦊", "東京 🦊🦊 é")
    assert arguments["json_with_tags"] == [{"body": {"html": '<b></parameter></function>"<parameter=x>'}}]
    assert arguments["json_never_closed"] == [{"body": '{"a": "x}', "page": 7}]
    assert arguments["json_as_python"] == [{"body": {"it": 'say "hi'}, "list": ["a"]}]


def test_a_tag_inside_a_json_string_is_text_only_where_the_schema_wants_json() -> None:
    text = '<function=read><parameter={}>{{"x": "</parameter>"}}</parameter></function>'
    schemas = tool_schemas(TOOLS)

    def value(name: str) -> Any:
        (found,) = parse_calls(text.replace("{}", name).replace("{{", "{").replace("}}", "}"), schemas)
        return json.loads(found["function"]["arguments"])[name]

    assert value("body") == {"x": "</parameter>"}
    assert value("note") == '{"x": "'  # a string written raw ends at the first tag
    assert value("unknown") == '{"x": "'


def test_a_json_value_cut_by_the_length_limit_inside_a_string_is_left_out() -> None:
    sample = Sample('<|/think|><|call|><function=read><parameter=body>{"x": "</parameter>', FinishReason.LENGTH)
    _, _, calls, _, cut_off = read(sample, mixed_tokens(TOKENIZER, sample.said), ())
    assert calls == [{"name": "read", "arguments": "{}"}] and cut_off
