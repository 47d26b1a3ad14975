"""A chat request: JSON fields -> ChatRequest -> prompt ids and the watch that reads the answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agens_engine.errors import RequestError
from agens_engine.server.fields import Fields, wrong
from agens_engine.server.options import GenerationOptions, SamplingDefaults, parse_options
from agens_engine.text.messages import Conversation, normalise_messages
from agens_engine.text.output import OutputOptions
from agens_engine.text.reasoning import CallMode
from agens_engine.text.template import RenderedPrompt

if TYPE_CHECKING:
    from agens_engine.server.model_text import ModelText

log = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20
# What the server itself gives the template; a client's chat_template_kwargs may not overrule it.
_RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


@dataclass(frozen=True)
class ChatRequest:
    """tools: function tools in OpenAI's nested form, as offered to the model (none when tool_choice is "none").
    template_kwargs: variables for the template, reasoning_effort and enable_thinking among them."""

    model: str | None
    conversation: Conversation
    tools: tuple[dict[str, Any], ...]
    call_mode: CallMode
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    options: GenerationOptions


def parse_chat(fields: Fields, defaults: SamplingDefaults) -> ChatRequest:
    """Read the body of /v1/chat/completions; raises RequestError naming the field."""
    if fields.get("messages") is None:
        raise RequestError("messages is missing; give a list with at least one message", param="messages")
    conversation = normalise_messages(fields.get("messages"))
    tools, call_mode = _offered_tools(fields)
    _check_response_format(fields)
    add_generation_prompt, continue_final = _final_message(fields, conversation)
    request = ChatRequest(
        model=fields.text("model"),
        conversation=conversation,
        tools=tools,
        call_mode=call_mode,
        template_kwargs=_template_kwargs(fields),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        options=parse_options(fields, defaults, _logprobs(fields)),
    )
    fields.warn_unread()
    return request


def render_chat(chat: ChatRequest, text: ModelText) -> RenderedPrompt:
    """Prompt tokens by the checkpoint's template; takes a while for long conversations, so call it on a thread."""
    return text.template.render(
        chat.conversation,
        chat.tools or None,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template_kwargs=chat.template_kwargs,
    )


def output_options(chat: ChatRequest, prompt: RenderedPrompt) -> OutputOptions:
    """How the answer to this prompt is to be read."""
    return OutputOptions(
        reasoning="content" if chat.template_kwargs.get("enable_thinking") is False else "split",
        calls=chat.call_mode,
        tools=chat.tools,
        stops=chat.options.stop,
        starts_in_reasoning=prompt.starts_in_reasoning,
    )


def _logprobs(fields: Fields) -> int | None:
    """Chat spells it as a switch and a count."""
    on = fields.flag("logprobs")
    top = fields.whole("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top and not on:
        fields.refuse("top_logprobs", "top_logprobs is only allowed together with logprobs: true")
    return (top or 0) if on else None


def _offered_tools(fields: Fields) -> tuple[tuple[dict[str, Any], ...], CallMode]:
    tools = tuple(_function_tools(fields.items("tools") or [], fields.name("tools")))
    choice = fields.get("tool_choice")
    name = fields.name("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        message = f"{name}: forcing a tool call is not supported by this server yet; use auto or none"
        raise RequestError(message, param=name)
    if choice not in (None, "auto", "none"):
        raise wrong(name, "auto, none, required or an object that names a tool", choice)
    if not tools:
        return (), "show"
    return ((), "drop") if choice == "none" else (tools, "parse")


def _function_tools(tools: list[Any], path: str) -> list[dict[str, Any]]:
    """Function tools, flat or nested; namespaces are flattened and other kinds skipped with a warning (case I10)."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if not isinstance(tool, dict):
            raise wrong(place, "an object", tool)
        entry = Fields(tool, place)
        kind = entry.text("type") or "function"
        if kind == "namespace":
            found += _function_tools(entry.items("tools") or [], f"{place}.tools")
        elif kind == "function":
            found.append(_function_tool(entry))
        else:
            log.warning("%s of type %s is not supported and was skipped", place, kind[:40])
    return found


def _function_tool(entry: Fields) -> dict[str, Any]:
    nested = entry.object("function")
    function = entry if nested is None else Fields(nested, entry.name("function"))
    name = function.text("name")
    if not name:
        raise RequestError(f"{function.name('name')} must be a non-empty string", param=function.name("name"))
    function.text("description")
    function.object("parameters")
    if nested is not None:
        return {**entry.values, "type": "function"}
    return {"type": "function", "function": {key: value for key, value in entry.values.items() if key != "type"}}


def _check_response_format(fields: Fields) -> None:
    raw = fields.object("response_format")
    if raw is None:
        return
    kind = Fields(raw, fields.name("response_format")).text("type")
    name = fields.name("response_format.type")
    if kind in ("json_object", "json_schema"):
        raise RequestError(f"{name}: {kind} is not supported by this server yet; only text is", param=name)
    if kind != "text":
        raise wrong(name, "text", kind)


def _final_message(fields: Fields, conversation: Conversation) -> tuple[bool, bool]:
    """Whether a new assistant turn is opened, or the last one is continued."""
    asked = fields.flag("add_generation_prompt")
    if not fields.flag("continue_final_message"):
        return asked is not False, False
    if asked:
        fields.refuse("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    last = conversation.messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        fields.refuse(
            "continue_final_message",
            "continue_final_message needs a last message of role assistant without tool calls",
        )
    return False, True


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """chat_template_kwargs, passed through; the two known ones are also accepted at top level."""
    extra = fields.object("chat_template_kwargs") or {}
    for key in _RESERVED_KWARGS:
        if key in extra:
            name = fields.name(f"chat_template_kwargs.{key}")
            raise RequestError(f"{name} is set by the server; use the field of the request", param=name)
    inner = Fields(extra, fields.name("chat_template_kwargs"))
    known = {
        "reasoning_effort": _first(inner.text("reasoning_effort"), fields.text("reasoning_effort")),
        "enable_thinking": _first(inner.flag("enable_thinking"), fields.flag("enable_thinking")),
    }
    rest = {key: value for key, value in extra.items() if key not in known and value is not None}
    return rest | {key: value for key, value in known.items() if value is not None}


def _first(inner: Any, outer: Any) -> Any:
    return outer if inner is None else inner
