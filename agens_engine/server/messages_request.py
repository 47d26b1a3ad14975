"""The body of /v1/messages, translated to the fields of a chat request.

    system                    one system message, without the line that Claude Code changes in every request (case G15)
    role system in messages   a user message: what was rendered before must stay as it is
    thinking, text, tool_use  one assistant message; a last assistant message is continued
    tool_result               a tool message, before the rest of its user message
    thinking {type}           thinking is off unless it is asked for, as this API's clients expect

Fields that chat has under the same name (sampling, stream, extensions) are passed through.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from agens_engine.errors import RequestError
from agens_engine.server.chat_request import TranslatedChat, chat_fields
from agens_engine.server.fields import Fields, wrong

log = logging.getLogger(__name__)

# A pseudo header at the very start of the system prompt; its checksum changes with every request.
_CHANGING_LINE = re.compile(r"\s*x-anthropic-[a-z-]+:[^\n]*(?:\n|$)", re.IGNORECASE)
# What this API calls by another name than chat does, for errors.
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate_message(fields: Fields) -> TranslatedChat:
    """raises   RequestError naming the field"""
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    system = _system(fields)
    if system:
        messages.append({"role": "system", "content": system})
        names.append("system")
    raw = fields.items("messages")
    if not raw:
        raise RequestError("messages must be a list with at least one message", param="messages")
    for index, message in enumerate(raw):
        for translated, name in _message(message, f"messages[{index}]"):
            messages.append(translated)
            names.append(name)
    last = messages[-1]
    continues = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    values: dict[str, Any] = {
        "messages": messages,
        "max_tokens": fields.get("max_tokens"),
        "stop": fields.items("stop_sequences"),
        "tools": _tools(fields),
        "continue_final_message": continues,
        **_tool_choice(fields),
        **_thinking(fields),
        **_output_config(fields),
    }
    return chat_fields(fields, values, _NAMES, names)


def _system(fields: Fields) -> str:
    raw = fields.get("system")
    if raw is None or isinstance(raw, str):
        texts = [raw or ""]
    elif isinstance(raw, list):
        texts = [_text(_block(block, f"system[{index}]")) for index, block in enumerate(raw)]
    else:
        raise wrong("system", "a string or a list of text blocks", raw)
    if texts:
        texts[0] = _CHANGING_LINE.sub("", texts[0], count=1) if _CHANGING_LINE.match(texts[0]) else texts[0]
    return "\n".join(text for text in texts if text)


def _message(raw: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """One message as chat messages with the places they came from."""
    if not isinstance(raw, dict):
        raise wrong(name, "an object with role and content", raw)
    message = Fields(raw, name)
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise wrong(message.name("role"), "user, assistant or system", role)
    content = message.get("content")
    if isinstance(content, str):
        return [({"role": "assistant" if role == "assistant" else "user", "content": content}, name)]
    if not isinstance(content, list):
        raise wrong(message.name("content"), "a string or a list of blocks", content)
    blocks = [_block(block, f"{name}.content[{index}]") for index, block in enumerate(content)]
    if role == "assistant":
        return [(_assistant(blocks), name)]
    if role == "system":
        return [({"role": "user", "content": "\n".join(_text(block) for block in blocks)}, name)]
    results = [block for block in blocks if block.text("type") == "tool_result"]
    rest = [_user_part(block) for block in blocks if block.text("type") != "tool_result"]
    found = [(_tool_result(block), block.path) for block in results]
    if rest or not found:
        found.append(({"role": "user", "content": rest}, name))
    return found


def _block(raw: Any, name: str) -> Fields:
    if not isinstance(raw, dict):
        raise wrong(name, "an object with a type", raw)
    return Fields(raw, name)


def _text(block: Fields) -> str:
    if block.text("type") != "text":
        raise wrong(block.name("type"), "text", block.get("type"))
    return _required(block, "text", allow_empty=True)


def _required(block: Fields, key: str, *, allow_empty: bool = False) -> str:
    value = block.text(key)
    if value is None or not (value or allow_empty):
        raise RequestError(
            f"{block.name(key)} must be a {'' if allow_empty else 'non-empty '}string", param=block.name(key)
        )
    return value


def _assistant(blocks: list[Fields]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            message["content"] += _text(block)
        elif kind == "thinking":
            thought = _required(block, "thinking", allow_empty=True)
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind == "redacted_thinking":
            log.debug("%s cannot be read here and was skipped", block.path)
        elif kind == "tool_use":
            function = {"name": _required(block, "name"), "arguments": block.object("input") or {}}
            call = {"id": _required(block, "id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise wrong(block.name("type"), "text, thinking or tool_use in an assistant message", kind)
    return message


def _user_part(block: Fields) -> dict[str, Any]:
    kind = block.text("type")
    if kind == "text":
        return {"type": "text", "text": _text(block)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block)}}
    raise wrong(block.name("type"), "text, image or tool_result", kind)


def _image_url(block: Fields) -> str:
    source = Fields(block.object("source") or {}, block.name("source"))
    kind = source.text("type")
    if kind == "url":
        return _required(source, "url")
    if kind == "base64":
        return f"data:{source.text('media_type') or ''};base64,{_required(source, 'data')}"
    raise wrong(source.name("type"), "base64 or url", kind)


def _tool_result(block: Fields) -> dict[str, Any]:
    raw = block.get("content")
    content: Any = raw or ""
    if isinstance(raw, list):
        content = [_user_part(_block(part, f"{block.name('content')}[{i}]")) for i, part in enumerate(raw)]
    elif raw is not None and not isinstance(raw, str):
        raise wrong(block.name("content"), "a string or a list of blocks", raw)
    return {"role": "tool", "tool_call_id": _required(block, "tool_use_id"), "content": content}


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Tools that the client runs; those that only Anthropic's servers run are skipped with a warning."""
    found: list[dict[str, Any]] = []
    for index, raw in enumerate(fields.items("tools") or []):
        tool = _block(raw, f"tools[{index}]")
        kind = tool.text("type")
        if kind not in (None, "custom"):
            log.warning("%s of type %s is not supported and was skipped", tool.path, kind[:40])
            continue
        function: dict[str, Any] = {"name": _required(tool, "name"), "description": tool.text("description")}
        function["parameters"] = tool.object("input_schema")
        kept = {key: value for key, value in function.items() if value is not None}
        found.append({"type": "function", "function": kept})
    return found


def _tool_choice(fields: Fields) -> dict[str, Any]:
    raw = fields.object("tool_choice")
    if raw is None:
        return {}
    choice = Fields(raw, "tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.flag("disable_parallel_tool_use") else {}
    kind = choice.text("type")
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": _required(choice, "name")}}, **parallel}
    if kind not in _CHOICES:
        raise wrong("tool_choice.type", "auto, any, tool or none", kind)
    return {"tool_choice": _CHOICES[kind], **parallel}


def _thinking(fields: Fields) -> dict[str, Any]:
    raw = fields.object("thinking")
    if raw is None:
        # the switches of the chat API work here, too
        return {} if fields.get("enable_thinking") is not None else {"enable_thinking": False}
    thinking = Fields(raw, "thinking")
    kind = thinking.text("type")
    if kind == "disabled":
        return {"enable_thinking": False}
    if kind not in ("enabled", "adaptive"):
        raise wrong("thinking.type", "enabled, adaptive or disabled", kind)
    budget = thinking.whole("budget_tokens", low=1)
    return {"enable_thinking": True} | ({} if budget is None else {"reasoning_budget": budget})


def _output_config(fields: Fields) -> dict[str, Any]:
    config = Fields(fields.object("output_config") or {}, "output_config")
    found: dict[str, Any] = {}
    effort = config.text("effort")
    if effort is not None:
        found["reasoning_effort"] = "xhigh" if effort == "max" else effort
    form = config.object("format")
    if form is not None:
        found["response_format"] = {"type": form.get("type")}
        if form.get("type") == "json_schema":
            found["response_format"]["schema"] = form.get("schema")
    return found
