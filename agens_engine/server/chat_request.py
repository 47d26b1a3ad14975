"""A conversation to answer: JSON fields -> ChatRequest -> prompt ids and how to read the answer -> Job."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agens_engine.errors import RequestError
from agens_engine.server.constraints import parse_call_plan
from agens_engine.server.fields import Fields, wrong
from agens_engine.server.host import LoadedModel
from agens_engine.server.job import Job, Prompt, make_job
from agens_engine.server.model_text import ModelText
from agens_engine.server.options import GenerationOptions, SamplingDefaults, parse_options
from agens_engine.text.call_grammar import CallPlan
from agens_engine.text.messages import Conversation, normalise_messages
from agens_engine.text.output import OutputOptions
from agens_engine.text.reasoning import CallMode
from agens_engine.text.template import RenderedPrompt

log = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20
# Fields of this dialect that others have no form for, or mean otherwise.
_CHAT_ONLY = frozenset(
    "messages tool_choice n logprobs top_logprobs stream_options response_format max_completion_tokens "
    "add_generation_prompt continue_final_message prompt text reasoning system thinking".split()
)
# Our own fields: a client may write them at the top level of any dialect, beside that dialect's own form.
_SAME_EVERYWHERE = frozenset({"reasoning_budget", "reasoning_effort"})


@dataclass(frozen=True)
class ChatRequest:
    """What every dialect that holds a conversation is translated to.

    tools            function tools in OpenAI's nested form, as offered to the model (none when tool_choice is "none")
    template_kwargs  variables for the template, reasoning_effort and enable_thinking among them
    param            the field that held the conversation, for errors
    calls            how the answer's grammar treats calls; None: it says nothing about them
    """

    model: str | None
    conversation: Conversation
    tools: tuple[dict[str, Any], ...]
    call_mode: CallMode
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    options: GenerationOptions
    param: str
    calls: CallPlan | None = None


@dataclass(frozen=True)
class TranslatedChat:
    """Another dialect's body as the fields of a chat request; message_names: where the client wrote each message."""

    fields: Fields
    message_names: Sequence[str]

    def parse(self, defaults: SamplingDefaults) -> ChatRequest:
        return parse_chat(self.fields, defaults, self.message_names)


def chat_fields(
    body: Fields, values: Mapping[str, Any], names: Mapping[str, str], message_names: Sequence[str]
) -> TranslatedChat:
    """The translated `values` on top of what both dialects call the same.

    names   what the client calls the fields that were translated, for errors
    """
    given = {key: value for key, value in values.items() if value is not None}
    translated = given.keys() | (names.keys() - _SAME_EVERYWHERE)
    shared = {key: value for key, value in body.values.items() if key not in _CHAT_ONLY and key not in translated}
    return TranslatedChat(Fields({**shared, **given}, names=names), message_names)


def parse_chat(fields: Fields, defaults: SamplingDefaults, message_names: Sequence[str] | None = None) -> ChatRequest:
    """Read the body of /v1/chat/completions, or one translated to it; raises RequestError naming the field.

    message_names   where the client wrote each message, for a translated body
    """
    if fields.get("messages") is None:
        raise RequestError("messages is missing; give a list with at least one message", param="messages")
    conversation = normalise_messages(fields.get("messages"), names=message_names)
    listed = _function_tools(fields.items("tools") or [], fields.name("tools"))
    options = parse_options(fields, defaults, _logprobs(fields))
    calls = parse_call_plan(fields, listed, options.answer)
    tools, call_mode = _offered_tools(fields, listed)
    add_generation_prompt, continue_final = _final_message(fields, conversation)
    if continue_final and (options.answer is not None or (calls is not None and calls.required)):
        fields.refuse("continue_final_message", "a grammar holds for a whole answer and cannot continue a begun one")
    request = ChatRequest(
        model=fields.text("model"),
        conversation=conversation,
        tools=tools,
        call_mode=call_mode,
        template_kwargs=_template_kwargs(fields),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        options=options,
        param=fields.name("messages"),
        calls=calls,
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


def chat_job(chat: ChatRequest, model: LoadedModel, response_id: str) -> Job:
    """Render the conversation and make engine requests of it."""
    prompt = render_chat(chat, model.text)
    reading = output_options(chat, prompt)
    return make_job(model, response_id, [Prompt(prompt.token_ids, reading, chat.param, chat.calls)], chat.options)


def _logprobs(fields: Fields) -> int | None:
    """Chat spells it as a switch and a count."""
    on = fields.flag("logprobs")
    top = fields.whole("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top and not on:
        fields.refuse("top_logprobs", "top_logprobs is only allowed together with logprobs: true")
    return (top or 0) if on else None


def _offered_tools(fields: Fields, listed: Sequence[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], CallMode]:
    """The tools the model is told about, and what becomes of calls in its answer."""
    if not listed:
        return (), "show"
    return ((), "drop") if fields.get("tool_choice") == "none" else (tuple(listed), "parse")


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
    inner = Fields(extra, fields.name("chat_template_kwargs"))
    effort = _first(inner.text("reasoning_effort"), fields.text("reasoning_effort"))
    thinking = _first(inner.flag("enable_thinking"), fields.flag("enable_thinking"))
    if effort == "none":  # OpenAI's words: no thinking at all, and as little as there is
        effort, thinking = None, False
    known = {"reasoning_effort": "low" if effort == "minimal" else effort, "enable_thinking": thinking}
    rest = {key: value for key, value in extra.items() if key not in known and value is not None}
    return rest | {key: value for key, value in known.items() if value is not None}


def _first(inner: Any, outer: Any) -> Any:
    return outer if inner is None else inner
