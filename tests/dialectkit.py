"""Reads the event streams of /v1/responses and /v1/messages like a strict client that checks every rule of order."""

from __future__ import annotations

import json
from typing import Any

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


def parse_events(raw: bytes) -> list[dict[str, Any]]:
    """The payloads of named events; fails on anything that is not a proper frame. Comments are skipped."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the last frame is not closed"
    payloads: list[dict[str, Any]] = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        head, _, data = block.partition("\n")
        assert head.startswith("event: ") and data.startswith("data: ") and "\n" not in data, block
        payload = json.loads(data.removeprefix("data: "))
        assert payload["type"] == head.removeprefix("event: ")
        payloads.append(payload)
    return payloads


async def events_of(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.post(path, json={**body, "stream": True}) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.headers["Content-Type"].startswith("text/event-stream")
    return parse_events(raw)


def joined_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response, after checking that the deltas before it say the same."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    text = ""
    is_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            item, is_open, text = event["item"], True, ""
            assert item["status"] == "in_progress" and not item.get("content") and not item.get("arguments")
            items.append(item)
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"] and _item_text(event["item"]) == text
            items[-1], is_open = event["item"], False
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text and event["name"] == items[-1]["name"]
            json.loads(text)
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        else:
            assert kind == "content_part.added" and event["part"]["text"] == ""
    final: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    if final["status"] == "completed":
        assert not is_open
    if final["status"] != "failed":
        done = items[:-1] if is_open else items
        assert final["output"][: len(done)] == done and len(final["output"]) == len(items)
        if is_open:  # a call that was cut off has no `done`
            assert final["output"][-1]["status"] == "incomplete" and _item_text(final["output"][-1]) == text
    return final


def _item_text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that follows the events ends up with."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    fragments = ""
    is_open = False
    for event in events[1:-2]:
        content = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"])
            is_open, fragments = True, ""
            continue
        assert is_open and event["index"] == len(content) - 1
        block = content[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(fragments)
            continue
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            assert block["type"] == "tool_use"
            fragments += delta["partial_json"]
        else:
            key = delta["type"].removesuffix("_delta")
            assert key in ({"thinking", "signature"} if block["type"] == "thinking" else {"text"})
            block[key] += delta[key]
    assert not is_open and events[-2]["type"] == "message_delta"
    return {**message, **events[-2]["delta"], **{key: events[-2][key] for key in ("usage", "limits")}}
