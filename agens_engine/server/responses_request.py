"""The body of /v1/responses, translated to the fields of a chat request.

    instructions, leading system and developer messages  one system message (the template allows one, in first place)
    later system and developer messages                  user messages: what was rendered before must stay as it is
    reasoning, message and function_call items in a row  one assistant message
    function_call_output                                 a tool message

Nothing is stored here: whatever refers to an earlier response is refused. Fields that chat has under the same name
(sampling, stream, tools, extensions) are passed through.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agens_engine.errors import RequestError
from agens_engine.server.chat_request import TranslatedChat, chat_fields
from agens_engine.server.fields import Fields, wrong
from agens_engine.text.messages import call_arguments

log = logging.getLogger(__name__)

_INSTRUCTION_ROLES = ("system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Items of tools that only OpenAI's own servers run, and bookkeeping of clients; the model here cannot read them.
_SKIPPED_ITEMS = frozenset({"compaction", "compaction_summary", "ghost_snapshot", "mcp_list_tools", "program"})
_SKIPPED_ENDINGS = ("_call", "_call_output", "_search_output", "_approval_request", "_approval_response")
# A thought that is handed to the client in `encrypted_content`, the one field of it that clients send back. There is
# nothing to hide from the client here, so it is only wrapped.
_WRAPPED_THOUGHT = "agens-thought:"
# What this API calls by another name than chat does, for errors.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True)
class ResponsesRequest:
    """namespaces: namespace of a tool by its name; wraps_thoughts: include asked for `reasoning.encrypted_content`."""

    chat: TranslatedChat
    namespaces: Mapping[str, str]
    wraps_thoughts: bool


def translate_response(fields: Fields) -> ResponsesRequest:
    """raises   RequestError naming the field"""
    _refuse_stored(fields)
    wraps_thoughts = _includes(fields)
    fields.object("metadata")
    turns = _read_input(fields)
    values: dict[str, Any] = {
        "messages": turns.messages,
        "max_completion_tokens": fields.get("max_output_tokens"),
        "response_format": _response_format(fields),
        "tool_choice": _tool_choice(fields),
        **_reasoning(fields),
    }
    chat = chat_fields(fields, values, _NAMES, turns.names)
    return ResponsesRequest(chat, _namespaces(fields.get("tools")), wraps_thoughts)


def wrap_thought(text: str) -> str:
    return _WRAPPED_THOUGHT + base64.b64encode(text.encode()).decode()


@dataclass
class _Turns:
    """Messages being made of items; names: the item that began each."""

    system: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        self.messages.append(message)
        self.names.append(name)
        return message

    def assistant(self, name: str, *, after: tuple[str, ...]) -> dict[str, Any]:
        """The assistant message under way, or a new one when there is none or it has one of the fields in `after`."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(key) for key in after):
            return self.add({"role": "assistant"}, name)
        return last


def _refuse_stored(fields: Fields) -> None:
    for key in ("previous_response_id", "conversation"):
        if fields.get(key) is not None:
            fields.refuse(key, f"{key} is not supported: responses are not stored here; send the whole input instead")
    if fields.flag("store"):
        fields.refuse("store", "store: true is not supported: responses are not stored here; set store to false")
    if fields.flag("background"):
        fields.refuse("background", "background is not supported: responses are not stored here; use stream instead")
    if fields.get("prompt") is not None:
        fields.refuse("prompt", "prompt templates are not stored here; write the text into input or instructions")


def _includes(fields: Fields) -> bool:
    wanted = fields.items("include") or []
    if fields.whole("top_logprobs", low=0) or "message.output_text.logprobs" in wanted:
        key = "top_logprobs" if fields.get("top_logprobs") else "include"
        fields.refuse(key, "log-probabilities are not given on this route; use logprobs of /v1/chat/completions")
    return "reasoning.encrypted_content" in wanted


def _read_input(fields: Fields) -> _Turns:
    turns = _Turns()
    instructions = fields.text("instructions")
    if instructions:
        turns.system.append(instructions)
    raw = fields.get("input")
    if isinstance(raw, str):
        turns.add({"role": "user", "content": raw}, "input")
    elif isinstance(raw, list):
        for index, item in enumerate(raw):
            if not isinstance(item, dict):
                raise wrong(f"input[{index}]", "an object", item)
            _read_item(Fields(item, f"input[{index}]"), turns)
    elif raw is not None:
        raise wrong("input", "a string or a list of items", raw)
    if not turns.messages:
        raise RequestError("input is missing or has no message; give a string or a list of items", param="input")
    if turns.system:
        turns.messages.insert(0, {"role": "system", "content": "\n\n".join(turns.system)})
        turns.names.insert(0, "instructions" if instructions else "input[0]")
    return turns


def _read_item(item: Fields, turns: _Turns) -> None:
    kind = item.text("type") or "message"
    if kind == "message":
        _read_message(item, turns)
    elif kind == "reasoning":
        thought = _thought(item)
        if thought:
            turn = turns.assistant(item.path, after=("content", "tool_calls"))
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    elif kind == "function_call":
        turn = turns.assistant(item.path, after=())
        turn.setdefault("tool_calls", []).append(_function_call(item))
    elif kind == "function_call_output":
        output = _parts(item, "output")
        turns.add({"role": "tool", "tool_call_id": _required(item, "call_id"), "content": output}, item.path)
    elif kind == "item_reference":
        item.refuse("type", f"{item.path} refers to an item of an earlier response, and responses are not stored here")
    elif kind in _SKIPPED_ITEMS or kind.endswith(_SKIPPED_ENDINGS):
        log.warning("%s of type %s is not supported and was skipped", item.path, kind[:40])
    else:
        known = "message, reasoning, function_call or function_call_output"
        raise wrong(item.name("type"), known, kind)


def _read_message(item: Fields, turns: _Turns) -> None:
    role = item.get("role")
    content = item.get("content")
    if role in _INSTRUCTION_ROLES:
        text = _parts(item, "content")
        if not isinstance(text, str):
            raise wrong(item.name("content"), f"text in a message of role {role}", text)
        if turns.messages:
            turns.add({"role": "user", "content": text}, item.path)
        else:
            turns.system.append(text)
    elif role == "assistant":
        text = _parts(item, "content")
        if not isinstance(text, str):
            raise wrong(item.name("content"), "text in a message of role assistant", text)
        last = turns.messages[-1] if turns.messages else {}
        # text after calls belongs to their turn: results pair with the message directly before them
        turn = turns.assistant(item.path, after=() if last.get("tool_calls") else ("content",))
        turn["content"] = turn.get("content", "") + text
    else:
        turns.add({"role": role, "content": content}, item.path)


def _function_call(item: Fields) -> dict[str, Any]:
    arguments = call_arguments(item.get("arguments"), item.name("arguments"))
    call_id = _required(item, "call_id")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": _required(item, "name"), "arguments": arguments},
    }


def _required(item: Fields, key: str) -> str:
    value = item.text(key)
    if not value:
        raise RequestError(f"{item.name(key)} must be a non-empty string", param=item.name(key))
    return value


def _parts(item: Fields, key: str) -> str | list[dict[str, Any]]:
    """A string or a list of parts; text parts are joined (case I9), images stay a list for the message reader."""
    raw = item.get(key)
    if raw is None or isinstance(raw, str):
        return raw or ""
    if not isinstance(raw, list):
        raise wrong(item.name(key), "a string or a list of parts", raw)
    parts = [_part(part, f"{item.name(key)}[{index}]") for index, part in enumerate(raw)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(raw: Any, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong(name, "an object", raw)
    part = Fields(raw, name)
    kind = part.text("type")
    if kind == "input_image":
        return raw
    if kind == "refusal":
        return {"type": "text", "text": part.text("refusal") or ""}
    if kind in _TEXT_PARTS:
        text = part.text("text")
        if text is None:
            raise RequestError(f"{name}.text must be a string", param=f"{name}.text")
        return {"type": "text", "text": text}
    raise wrong(f"{name}.type", "input_text, output_text or input_image", kind)


def _thought(item: Fields) -> str:
    """The thought itself, else what was wrapped here for a client that keeps no thoughts, else a summary."""
    thought, summary = _parts(item, "content"), _parts(item, "summary")
    wrapped = item.text("encrypted_content") or ""
    if isinstance(thought, str) and thought:
        return thought
    if wrapped.startswith(_WRAPPED_THOUGHT):
        try:
            return base64.b64decode(wrapped.removeprefix(_WRAPPED_THOUGHT), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            item.refuse("encrypted_content", f"{item.name('encrypted_content')} was changed on its way; leave it out")
    return summary if isinstance(summary, str) else ""


def _response_format(fields: Fields) -> dict[str, Any] | None:
    raw = Fields(fields.object("text") or {}, "text").object("format")
    if raw is None:
        return None
    if raw.get("type") != "json_schema":
        return {"type": raw.get("type")}
    return {"type": "json_schema", "schema": raw.get("schema"), "strict": raw.get("strict")}


def _tool_choice(fields: Fields) -> Any:
    choice = fields.get("tool_choice")
    if not isinstance(choice, dict):
        return choice
    named = Fields(choice, "tool_choice")
    if named.text("type") != "function":
        raise wrong("tool_choice.type", "function", choice.get("type"))
    return {"type": "function", "function": {"name": _required(named, "name")}}


def _reasoning(fields: Fields) -> dict[str, Any]:
    effort = Fields(fields.object("reasoning") or {}, "reasoning").text("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _namespaces(tools: Any, namespace: str | None = None) -> dict[str, str]:
    """Clients want a call back with the namespace that its tool was listed in; the model sees only the name."""
    found: dict[str, str] = {}
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, dict):
            continue
        name = tool.get("name")
        if tool.get("type") == "namespace":
            found = _namespaces(tool.get("tools"), name if isinstance(name, str) else None) | found
        elif namespace is not None and isinstance(name, str):
            found.setdefault(name, namespace)
    return found
