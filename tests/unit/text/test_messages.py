"""Messages as clients write them (cases I5, I6, I7, I14, B9)."""

from __future__ import annotations

from typing import Any

import pytest

from agens_engine.errors import RequestError
from agens_engine.text.messages import normalise_messages

USER = {"role": "user", "content": "hi"}


def call(call_id: str | None, arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id else {})


def result(call_id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


def refused(messages: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        normalise_messages(messages)
    return caught.value


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user"}])
def test_i5_empty_or_no_list_names_messages(messages: Any) -> None:
    assert refused(messages).param == "messages"


def test_i6_text_parts_equal_the_string() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert normalise_messages([{"role": "user", "content": parts}]) == normalise_messages([USER])
    assert normalise_messages([{"role": "user", "content": ["h", {"text": "i"}]}]) == normalise_messages([USER])


def test_i7_null_missing_and_empty_content_are_equal() -> None:
    turns: list[dict[str, Any]] = [{"role": "assistant"}, {"role": "assistant", "content": None}]
    turns += [{"role": "assistant", "content": ""}, {"role": "assistant", "content": []}]
    forms = [normalise_messages([USER, turn | {"tool_calls": [call("a")]}, result("a", "x")]) for turn in turns]
    assert all(form == forms[0] for form in forms)
    assert forms[0].messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [3]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
        ({"role": "assistant", "reasoning": 3}, "messages[1].reasoning"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call("a", "{")]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("a", "[1]")]}, "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_malformed_messages_name_the_field(message: Any, param: str) -> None:
    assert refused([USER, message]).param == param


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_become_an_object(arguments: Any) -> None:
    [_, turn] = normalise_messages([USER, {"role": "assistant", "tool_calls": [call("a", arguments)]}]).messages
    assert turn["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("arguments", [None, "", " ", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    [turn] = normalise_messages([{"role": "assistant", "tool_calls": [call(None, arguments)]}]).messages
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_b9_reasoning_has_two_names() -> None:
    for key in ("reasoning", "reasoning_content"):
        [turn] = normalise_messages([{"role": "assistant", "content": "a", key: "t"}]).messages
        assert turn == {"role": "assistant", "content": "a", "reasoning_content": "t"}


def test_developer_is_system_and_unknown_keys_are_dropped() -> None:
    [message] = normalise_messages([{"role": "developer", "content": "x", "cache_control": {}}]).messages
    assert message == {"role": "system", "content": "x"}


def test_images_are_listed_in_reading_order_when_allowed() -> None:
    content = [{"type": "image_url", "image_url": {"url": "u1"}}, {"type": "text", "text": "x"}]
    found = normalise_messages([USER, {"role": "user", "content": content}], allow_images=True)
    assert found.messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "x"}]
    assert [(i.source, i.param) for i in found.images] == [({"url": "u1"}, "messages[1].content[0].image_url")]


def test_i14_results_are_put_in_the_order_of_their_calls() -> None:
    turn = {"role": "assistant", "tool_calls": [call("a"), call("b")]}
    messages = normalise_messages([USER, turn, result("b", "B"), result("a", "A"), USER]).messages
    assert [m["content"] for m in messages[2:4]] == ["A", "B"]
    assert [m["content"] for m in normalise_messages([turn, result("a", "A")]).messages] == ["", "A"]


def test_i14_results_without_any_ids_keep_their_order() -> None:
    turn = {"role": "assistant", "tool_calls": [call(None), call(None)]}
    for ids in ((None, None), ("x", "y")):
        messages = normalise_messages([turn, result(ids[0], "A"), result(ids[1], "B")]).messages
        assert [m["content"] for m in messages[1:]] == ["A", "B"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([result("a", "x")], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [call("a")]}, USER, result("a", "x")], "messages[2].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [call("a")]}, result("z", "x")], "messages[1].tool_call_id"),
        (
            [{"role": "assistant", "tool_calls": [call("a")]}, result("a", "x"), result("a", "y")],
            "messages[2].tool_call_id",
        ),
        ([{"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("b", "x")], "messages[1]"),
        ([{"role": "assistant", "tool_calls": [call("a"), call("a")]}, result("a", "x")], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("a", "x"), result(None, "y")],
            "messages[2].tool_call_id",
        ),
    ],
)
def test_i14_what_cannot_be_paired_is_refused(messages: Any, param: str) -> None:
    assert refused(messages).param == param
