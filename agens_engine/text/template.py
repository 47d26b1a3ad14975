"""The checkpoint's own chat template: a conversation to prompt tokens (spec serving.md, section 2).

The template is the file that was shipped (chat_template.jinja, or `chat_template` in tokenizer_config.json), rendered
in a sandbox with the helpers that such templates expect. Whatever it objects to is a TemplateError (HTTP 400) with its
words.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agens_engine.errors import CheckpointError, RequestError, TemplateError
from agens_engine.text.guard import Guard
from agens_engine.text.messages import Conversation, normalise_messages
from agens_engine.text.tokenizer import Tokenizer, read_json

# An open <|think|> counts when it is among the last so many prompt tokens (spec section 5).
_OPEN_THINK_WINDOW = 16
# What is given to the template here, or means something to Jinja; chat_template_kwargs may not overrule it.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "self"})


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt ready for the engine.

    text                 the rendered text, for logs and debugging (not for encoding: client text in it is not marked)
    starts_in_reasoning  the answer begins inside a thought that the prompt opened
    """

    token_ids: list[int]
    text: str
    starts_in_reasoning: bool


class _Refused(Exception):
    """raise_exception() was called by the template."""


class ChatTemplate:
    """A compiled template together with the tokenizer of the same folder. Safe to share between threads."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer, where: str) -> None:
        """sources: templates by name; "default", and perhaps "tool_use" for requests with tools."""
        self._tokenizer = tokenizer
        self._where = where
        env = _environment()
        try:
            self._templates = {name: env.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as err:
            raise CheckpointError(f"{where}, line {err.lineno}: {err.message}") from err

    @classmethod
    def load(cls, model_dir: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """raises CheckpointError when the folder has no template or one that is not valid Jinja"""
        folder = Path(model_dir)
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls({"default": path.read_text(encoding="utf-8")}, tokenizer, str(path))
            except (OSError, UnicodeDecodeError) as err:
                raise CheckpointError(f"cannot read {path}: {err}") from err
        config_path = folder / "tokenizer_config.json"
        found = read_json(config_path, missing_ok=True).get("chat_template")
        if isinstance(found, list):
            found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        elif isinstance(found, str):
            found = {"default": found}
        if not isinstance(found, dict) or not isinstance(found.get("default"), str):
            raise CheckpointError(
                f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json; copy the one "
                "that was shipped with the model into it"
            )
        return cls({k: v for k, v in found.items() if isinstance(v, str)}, tokenizer, str(config_path))

    def render(
        self,
        messages: Any,
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Prompt tokens of a conversation. Client text never becomes control tokens (guard.py).

        messages                the request's `messages`, or a Conversation from normalise_messages (needed for images)
        continue_final_message  end the prompt inside the last (assistant) message, for the model to write on
        enable_thinking, reasoning_effort  None: the template's default. "high" falls back to "xhigh" where the template
                                refuses "high", of which it is an alias
        chat_template_kwargs    passed through to the template; goes before the two fields above
        raises  RequestError for malformed messages, TemplateError for what the template refuses
        """
        conversation = messages if isinstance(messages, Conversation) else normalise_messages(messages)
        variables = {"enable_thinking": enable_thinking, "reasoning_effort": reasoning_effort}
        variables = {k: v for k, v in variables.items() if v is not None} | dict(chat_template_kwargs or {})
        taken = sorted(_RESERVED & variables.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]}, which the server sets; use the request's own fields",
                param=f"chat_template_kwargs.{taken[0]}",
            )
        arguments = (conversation.messages, tools, add_generation_prompt, continue_final_message)
        try:
            return self._render(*arguments, variables)
        except TemplateError:
            if variables.get("reasoning_effort") != "high":
                raise
        return self._render(*arguments, variables | {"reasoning_effort": "xhigh"})

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> RenderedPrompt:
        tokenizer = self._tokenizer
        try:
            guard = Guard(tokenizer.reserved_texts, [messages, tools, variables])
            # Roles are ours by now (messages.py), and templates compare and paste them.
            guarded = [{k: v if k == "role" else guard.protect(v) for k, v in m.items()} for m in messages]
            protected = {k: guard.protect(v) for k, v in variables.items()}
            offered = guard.protect(list(tools)) if tools else None
        except RecursionError:
            raise RequestError("the request's JSON is nested too deeply; flatten it", param="messages") from None
        end_mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                    param="continue_final_message",
                )
            end_mark = _mark_end(guarded)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            text = self._templates[name].render(
                {
                    **tokenizer.special_texts,
                    **protected,
                    "messages": guarded,
                    "tools": offered,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as err:  # a template is a program: whatever it trips over concerns this request only
            reason = guard.restore(str(err)).replace(end_mark or "\0", "")
            if not isinstance(err, _Refused):
                reason = f"the chat template cannot render this conversation: {reason or type(err).__name__}"
            raise TemplateError(reason) from err
        if end_mark:
            head, found, _ = text.rpartition(end_mark)
            if not found:
                raise TemplateError("the chat template leaves out the message to be continued", param="messages")
            text = head.replace(end_mark, "")
        ids = guard.encode(tokenizer, text)
        return RenderedPrompt(ids, guard.restore(text), starts_in_reasoning(ids, tokenizer))


def starts_in_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether <|think|> is among the last 16 prompt tokens without a later <|/think|>."""
    for token_id in reversed(prompt_ids[-_OPEN_THINK_WINDOW:]):
        if token_id == tokenizer.think_end_id:
            return False
        if token_id == tokenizer.think_start_id:
            return True
    return False


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Append a private mark to the text of the final message: the prompt is cut there after rendering."""
    last = messages[-1]
    field = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last[field], str) or not last[field]:
        raise RequestError(
            "continue_final_message needs an assistant message with text and without tool calls at the end",
            param=f"messages[{len(messages) - 1}]",
        )
    mark = f"q{secrets.token_hex(8)}end"
    messages[-1] = {**last, field: last[field] + mark}
    return mark


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike Jinja's own filter, which escapes for HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
