"""The form an answer must have: response_format, structured_outputs, tools and tool_choice -> AnswerFormat, CallPlan.

`structured_outputs` is what current vLLM calls it, `guided_*` its former names, `grammar` and `json_schema` those of
llama.cpp; they mean the same here and exclude each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agens_engine.errors import RequestError
from agens_engine.server.fields import Fields, wrong
from agens_engine.text.call_grammar import CallPlan
from agens_engine.text.grammars import AnswerFormat

Kind = Literal["json", "regex", "choice", "grammar"]
_GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
_STRUCTURED: dict[str, Kind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
# Keys of structured_outputs that are harmless when they are off, and cannot be honoured when they are on.
_STRUCTURED_OFF = ("structural_tag", "whitespace_pattern", "disable_additional_properties", "disable_any_whitespace")
_MAX_CHOICES = 4096


def parse_answer_format(fields: Fields) -> AnswerFormat | None:
    """The form asked for the answer's text, or None for free text; raises RequestError naming the field."""
    found = [_response_format(fields), *_structured_outputs(fields)]
    found += [_answer(fields, key, kind) for key, kind in _GUIDED.items()]
    asked = [answer for answer in found if answer is not None]
    if len(asked) > 1:
        names = f"{asked[0].param} and {asked[1].param}"
        raise RequestError(f"{names} both say what the answer must look like; keep one", param=asked[1].param)
    return asked[0] if asked else None


def parse_call_plan(fields: Fields, tools: Sequence[Mapping[str, Any]], answer: AnswerFormat | None) -> CallPlan | None:
    """How the grammar treats tool calls, or None where the model calls as it likes (or cannot).

    tools    function tools in the nested form, all that the client listed
    answer   with one, calls are part of the grammar, too: the answer is a call or has that form (case D1)
    raises   RequestError for a tool_choice that is not one, or names a tool that is not there
    """
    choice, name = fields.get("tool_choice"), fields.name("tool_choice")
    parallel = fields.flag("parallel_tool_calls") is not False
    if isinstance(choice, dict):
        wanted = _chosen_name(Fields(choice, name))
        named = tuple(tool for tool in tools if tool["function"]["name"] == wanted)
        if not named:
            raise RequestError(f"{name} names {wanted[:60]!r}, which is not among the tools", param=name)
        return CallPlan(named[-1:], required=True, parallel=parallel)
    if choice not in (None, "auto", "none", "required"):
        raise wrong(name, "auto, none, required or an object that names a tool", choice)
    if choice == "required":
        if not tools:
            raise RequestError(f"{name} is required, but no tools are given", param=name)
        return CallPlan(tuple(tools), required=True, parallel=parallel)
    if not tools or choice == "none":
        return None
    strict = any(tool["function"].get("strict") is True for tool in tools)
    if answer is None and parallel and not strict:
        return None
    return CallPlan(tuple(tools), required=False, parallel=parallel)


def _chosen_name(choice: Fields) -> str:
    """{"type": "function", "function": {"name": ...}}, or flat."""
    if (kind := choice.text("type")) != "function":
        raise wrong(choice.name("type"), "function", kind)
    nested = choice.object("function")
    function = choice if nested is None else Fields(nested, choice.name("function"))
    wanted = function.text("name")
    if not wanted:
        raise RequestError(f"{function.name('name')} must be the name of a tool", param=function.name("name"))
    return wanted


def _response_format(fields: Fields) -> AnswerFormat | None:
    raw = fields.object("response_format")
    if raw is None:
        return None
    entry = Fields(raw, fields.name("response_format"))
    kind = entry.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = entry.object("schema")  # llama.cpp allows one here
        return AnswerFormat("json", schema or {"type": "object"}, entry.name("schema" if schema else "type"))
    if kind != "json_schema":
        raise wrong(entry.name("type"), "text, json_object or json_schema", kind)
    # Responses and Messages write the schema beside the type; a chat request that does so means the same
    nested = "schema" not in raw or raw.get("json_schema") is not None
    inner = Fields(entry.object("json_schema") or {}, entry.name("json_schema")) if nested else entry
    schema = inner.object("schema")
    if schema is None:
        raise RequestError(f"{inner.name('schema')} is missing; give the JSON schema", param=inner.name("schema"))
    return AnswerFormat("json", schema, inner.name("schema"), strict=inner.flag("strict") is not False)


def _structured_outputs(fields: Fields) -> list[AnswerFormat | None]:
    raw = fields.object("structured_outputs")
    if raw is None:
        return []
    entry = Fields(raw, fields.name("structured_outputs"))
    for key in _STRUCTURED_OFF:
        if entry.get(key) not in (None, False):
            entry.refuse(key, f"{entry.name(key)} is not supported by this server; leave it out")
    found = [_answer(entry, key, kind) for key, kind in _STRUCTURED.items()]
    if entry.flag("json_object"):
        found.append(AnswerFormat("json", {"type": "object"}, entry.name("json_object")))
    unknown = sorted(set(raw) - {*_STRUCTURED, *_STRUCTURED_OFF, "json_object"})
    if unknown or not any(found):
        what = f"{entry.path} has the unknown key {unknown[0][:60]!r}" if unknown else f"{entry.path} asks for nothing"
        raise RequestError(f"{what}; give one of {', '.join(_STRUCTURED)}", param=entry.path)
    return found


def _answer(fields: Fields, key: str, kind: Kind) -> AnswerFormat | None:
    value, name = fields.get(key), fields.name(key)
    if value is None:
        return None
    if kind == "json":
        value = _schema(value, name)
    elif kind == "choice":
        _check_choices(value, name)
    elif not isinstance(value, str) or not value.strip():
        raise wrong(name, "a non-empty string", value)
    return AnswerFormat(kind, value, name)


def _schema(value: Any, name: str) -> dict[str, Any]:
    """A JSON schema as an object, or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{name} is a string, but not the text of a JSON schema", param=name) from None
    if not isinstance(value, dict):
        raise wrong(name, "a JSON schema (an object)", value)
    return value


def _check_choices(value: Any, name: str) -> None:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_CHOICES:
        raise wrong(name, f"a list of 1 to {_MAX_CHOICES} strings", value)
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise wrong(f"{name}[{index}]", "a non-empty string", item)
