"""Bodies of /v1/responses and /v1/messages with anything in any place: served, or refused with a typed error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.errors import RequestError
from agens_engine.server.anthropic_messages import prepare_message
from agens_engine.server.fields import Fields
from agens_engine.server.openai_responses import prepare_response
from tests.property.test_dialect_streams import SCHEMA, loaded

RESPONSE: dict[str, Any] = {
    "model": "fake",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "message", "role": "user", "content": "hello"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"page": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [
        {"type": "function", "name": "read", "parameters": SCHEMA},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "temperature": 1.0,
    "store": False,
    "stream": True,
}
MESSAGE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"page": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "mode"},
    ],
    "tools": [{"name": "read", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "max"},
    "stop_sequences": ["zz"],
    "metadata": {"user_id": "u"},
    "stream": True,
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["text", "function"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=6,
)
DIALECTS = {"responses": (RESPONSE, prepare_response), "messages": (MESSAGE, prepare_message)}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


@given(st.sampled_from(sorted(DIALECTS)), st.data())
@settings(max_examples=300, deadline=None)
def test_one_wrong_value_is_served_or_refused_by_name(name: str, data: st.DataObject) -> None:
    template, prepare = DIALECTS[name]
    body = copy.deepcopy(template)
    container, key = data.draw(st.sampled_from(list(places(body))))
    if data.draw(st.booleans()) and isinstance(container, dict):
        del container[key]
    else:
        container[key] = data.draw(VALUES)
    try:
        reply = prepare(Fields(body), loaded())
    except RequestError as error:
        assert str(error)
    else:
        assert reply.job.requests[0].prompt_ids and reply.first_frames()


def test_the_bodies_are_valid_as_they_are() -> None:
    for body, prepare in DIALECTS.values():
        assert prepare(Fields(copy.deepcopy(body)), loaded()).job.options.stream
