"""Documents to text with the shipped chat template, in the sandboxed environment that serving uses."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scripts.nano.document import Document
from scripts.nano.lexicon import ASSET_DIR


class TemplateRefusal(ValueError):
    """The template called raise_exception."""


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@cache
def template() -> jinja2.Template:
    """The compiled template of nano."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string((ASSET_DIR / "chat_template.jinja").read_text(encoding="utf-8"))


def render_text(document: Document, *, prompt_only: bool = False) -> str:
    """The whole conversation as text; with prompt_only everything before the last assistant turn, ready to continue."""
    messages = document.messages
    if prompt_only:
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message of the document is not an assistant turn")
        messages = messages[:-1]
    return template().render(
        messages=messages,
        tools=document.tools,
        enable_thinking=document.enable_thinking,
        reasoning_effort=document.reasoning_effort,
        add_generation_prompt=prompt_only,
    )
