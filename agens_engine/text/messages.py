"""The `messages` of a request, checked and brought into the one form that templates see.

Clients differ: content is a string, null, missing or a list of parts (cases I6, I7); arguments are JSON text or an
object; reasoning is called `reasoning_content` or `reasoning`; tool results come in any order (case I14). After this
file:

    role               system, user, assistant or tool (developer is system)
    content            text ("" for nothing), or with images a list of {"type": "text" | "image", ...} parts
    reasoning_content  text, only on assistant turns that have it
    tool_calls         [{id, type, function: {name, arguments: object}}], only on assistant turns that have some
    tool_call_id, name where the client gave them

Results are put in the order of the calls they answer, because templates pair them by position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agens_engine.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS = frozenset({"image_url", "image", "input_image"})


@dataclass(frozen=True)
class ImagePart:
    """One image of the conversation. `source` is what the client sent, undecoded; `param` names the field."""

    source: Any
    param: str


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    images: tuple[ImagePart, ...] = ()


def normalise_messages(
    messages: Any, *, allow_images: bool = False, names: Sequence[str] | None = None
) -> Conversation:
    """Check `messages` and bring them into template form.

    names   where the client wrote each message, when it was not in `messages` (another dialect was translated)
    raises  RequestError whose `param` names the message and field at fault; an image part is one unless allow_images
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    images: list[ImagePart] = []
    names = names or [f"messages[{i}]" for i in range(len(messages))]
    normal = [_message(m, name, images, allow_images) for m, name in zip(messages, names, strict=True)]
    return Conversation(_pair_results(normal, names), tuple(images))


def _message(message: Any, param: str, images: list[ImagePart], allow_images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{param} must be an object with role and content", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{param}.role must be one of {', '.join(_ROLES)}, not {role!r}", param=f"{param}.role")
    normal: dict[str, Any] = {"role": _ROLES[role]}
    allow_images = allow_images and role in ("user", "tool")
    normal["content"] = _content(message.get("content"), f"{param}.content", images, allow_images)
    for key in ("name", "tool_call_id"):
        value = _optional_text(message.get(key), f"{param}.{key}")
        if value is not None:
            normal[key] = value
    if role == "assistant":
        reasoning_key = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
        reasoning = _optional_text(message.get(reasoning_key), f"{param}.{reasoning_key}")
        if reasoning is not None:
            normal["reasoning_content"] = reasoning
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list | tuple):
            raise RequestError(f"{param}.tool_calls must be a list", param=f"{param}.tool_calls")
        if calls:
            normal["tool_calls"] = [_tool_call(c, f"{param}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return normal


def _optional_text(value: Any, param: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{param} must be a string", param=param)
    return value


def _content(content: Any, param: str, images: list[ImagePart], allow_images: bool) -> str | list[dict[str, Any]]:
    """Text parts are joined without a separator, as templates that walk the parts do."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RequestError(f"{param} must be a string, null or a list of parts", param=param)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        parts.append(_part(part, f"{param}[{i}]", images, allow_images))
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, param: str, images: list[ImagePart], allow_images: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{param}.{_TEXT_PARTS[kind]} must be a string", param=f"{param}.{_TEXT_PARTS[kind]}")
        return {"type": "text", "text": text}
    if isinstance(kind, str) and kind in _IMAGE_PARTS:
        if not allow_images:
            raise RequestError(
                f"{param} is an image, which can be given only in user and tool messages and only to a server started "
                "with --images on",
                param=param,
            )
        source = part.get("image_url", part.get("image"))
        images.append(ImagePart(source, f"{param}.image_url"))
        return {"type": "image"}
    raise RequestError(f"{param}.type must be text or image_url, not {kind!r}", param=f"{param}.type")


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{param} must be an object with a function", param=param)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{param}.function.name must be a non-empty string", param=f"{param}.function.name")
    normal: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "arguments": call_arguments(function.get("arguments"), f"{param}.function.arguments"),
        },
    }
    call_id = _optional_text(call.get("id"), f"{param}.id")
    return {"id": call_id, **normal} if call_id is not None else normal


def call_arguments(arguments: Any, param: str) -> dict[str, Any]:
    """The arguments of a call, given as JSON text or as they are; raises RequestError naming `param`."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as err:
            raise RequestError(f"{param} is not valid JSON: {err}", param=param) from err
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{param} must be a JSON object, as text or as it is", param=param)
    return {str(key): value for key, value in arguments.items()}


def _pair_results(messages: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Put each run of tool messages in the order of the calls directly before it; refuse what cannot be paired."""
    paired: list[dict[str, Any]] = []
    calls: list[str] | None = None  # ids of the last assistant turn, None where it gave none or is not directly before
    start = 0
    while start < len(messages):
        if messages[start]["role"] != "tool":
            paired.append(messages[start])
            calls = [c.get("id") for c in messages[start].get("tool_calls", ())]
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        paired.extend(_in_call_order(messages[start:end], calls or [], names, start))
        start = end
    return paired


def _in_call_order(
    results: list[dict[str, Any]], calls: list[Any], names: Sequence[str], first_idx: int
) -> list[dict[str, Any]]:
    if not any("tool_call_id" in r for r in results) or (calls and all(c is None for c in calls)):
        return results  # nobody named anything: the order given is all there is
    if len(set(calls)) != len(calls):
        param = f"{names[first_idx - 1]}.tool_calls"
        raise RequestError(f"{param} has two calls with the same id; ids must differ", param=param)
    found: dict[str, dict[str, Any]] = {}
    for i, result in enumerate(results, first_idx):
        param = f"{names[i]}.tool_call_id"
        call_id = result.get("tool_call_id")
        if call_id is None:
            raise RequestError(f"{param} is missing, though other results of the same turn have one", param=param)
        if call_id not in calls:
            raise RequestError(
                f"{param} {call_id!r} answers no call of the assistant message directly before; send the results right "
                "after the message with the calls",
                param=param,
            )
        if call_id in found:
            raise RequestError(f"{param} {call_id!r} was already answered", param=param)
        found[call_id] = result
    answered = [c in found for c in calls]
    if not all(answered[: sum(answered)]):
        missing = calls[answered.index(False)]
        raise RequestError(
            f"{names[first_idx]}: the call {missing!r} has no result though a later one has; send one for each call",
            param=names[first_idx],
        )
    return [found[c] for c in calls if c in found]
