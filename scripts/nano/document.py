"""The document: one synthetic conversation, and small helpers to write its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are Agens nano by Blockway.",
    "Be brief.",
    "Answer the user.",
    "You are a careful assistant. Use the tools you have.",
    "You are a helpful assistant.",
    "",
)


@dataclass
class Document:
    """A conversation in the OpenAI message form.

    kind     which generator wrote it (corpus.MIX has the names)
    expect   what a scorer needs to judge the last assistant turn (scoring.py says which keys each kind has)
    """

    kind: str
    messages: list[Message]
    tools: list[Tool] | None = None
    enable_thinking: bool = True
    reasoning_effort: str | None = None
    expect: dict[str, Any] = field(default_factory=dict)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool_result(text: str) -> Message:
    return {"role": "tool", "content": text}


def assistant(text: str, *, thought: str, thinking: bool) -> Message:
    """An assistant turn; the thought is kept only when thinking is on."""
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thought
    return message


def assistant_calls(calls: list[tuple[str, dict[str, Any]]], *, thought: str, thinking: bool) -> Message:
    """An assistant turn that only calls tools: (name, arguments) in order."""
    message = assistant("", thought=thought, thinking=thinking)
    message["tool_calls"] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return message
