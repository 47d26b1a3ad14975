"""Parameter texts to JSON values by the declared schema (typing table of spec serving.md, section 4).

A tool call carries its values as bare text; the JSON type comes from tools[i].function.parameters.properties[name].
What does not parse as its type stays the text it was: nothing is ever lost here.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from agens_engine.text.schema_refs import resolved

_INTEGER_RE = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_NUMBER_RE = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", re.ASCII | re.IGNORECASE)
_STRING_TYPES = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_BOOLEAN_TYPES = frozenset({"boolean", "bool", "binary"})
_INTEGER_STARTS = ("int", "uint", "long", "short", "unsigned")
_NUMBER_STARTS = ("num", "float")
_JSON_TYPES = frozenset({"object", "array", "arr"})
_JSON_STARTS = ("dict", "list")

ToolSchemas = Mapping[str, Mapping[str, Any]]  # function name -> parameter name -> schema


class _NoParse(Exception):
    """The text is not a value of the type; the caller falls back."""


def tool_schemas(tools: Iterable[Any] | None) -> ToolSchemas:
    """Parameter schemas by function name, from the API's `tools` (with or without the outer `function` object).

    Entries without a name or without properties are simply not typed; whether they are allowed is the server's
    question.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
            found[function["name"]] = {key: parameter_schema(sub, parameters) for key, sub in properties.items()}
        else:
            found[function["name"]] = {}
    return found


def parameter_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's schema with the references at its top followed, so that its type can be seen."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or "type" in schema:
        return schema
    whole = schema.get("allOf")
    if isinstance(whole, list) and len(whole) == 1:  # how some generators write a reference with a description
        inner = resolved(whole[0], root)
        return {**inner, **{k: v for k, v in schema.items() if k != "allOf"}} if isinstance(inner, Mapping) else schema
    lists = {key: schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)}
    return {**schema, **{key: [resolved(option, root) for option in options] for key, options in lists.items()}}


def json_kinds(schema: Any) -> list[str]:
    """The JSON types that `value_json` can make of a parameter, in the order in which it tries them.

    "text" stands for a string written raw; "null" comes last where null is allowed, as it is without any type
    """
    kinds = list(dict.fromkeys(_kind(name) for name in _type_names(schema)))
    if not kinds:
        return ["text", "null"]
    return kinds + (["null"] if "null" not in kinds and _nullable(schema) else [])


def _nullable(schema: Mapping[str, Any]) -> bool:
    declared = schema.get("type")
    if isinstance(declared, list):
        return "null" in declared
    options = [o for key in ("anyOf", "oneOf") for o in schema.get(key) or () if isinstance(o, Mapping)]
    return schema.get("nullable") is True or any(o.get("type") == "null" or _nullable(o) for o in options)


def _kind(type_name: str) -> str:
    if type_name.startswith(_INTEGER_STARTS):
        return "integer"
    if type_name.startswith(_NUMBER_STARTS):
        return "number"
    if type_name in _BOOLEAN_TYPES:
        return "boolean"
    if type_name in ("array", "arr") or type_name.startswith("list"):
        return "array"
    if type_name == "object" or type_name.startswith("dict"):
        return "object"
    return "null" if type_name == "null" else "text"


def to_json(value: Any) -> str:
    """JSON text that any strict reader accepts; raises ValueError or TypeError for what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, written as \\ud83d in the model's JSON
        return json.dumps(value, allow_nan=False)
    return text


def value_json(text: str, schema: Any) -> str:
    """The JSON text of one parameter's value.

    text    the parameter as the model wrote it, outer newlines already removed
    schema  the JSON schema of the parameter, or None where there is none
    """
    if text.lower() == "null":
        return "null"
    for type_name in _type_names(schema):
        try:
            return _parse_as(type_name, text, alone=isinstance(schema.get("type"), str))
        except _NoParse:
            continue
    return to_json(text)


def _type_names(schema: Any) -> list[str]:
    """Types to try, in order; none means: keep the text."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared.strip().lower()]
    names: list[str] = []
    if isinstance(declared, list):
        names = [t.strip().lower() for t in declared if isinstance(t, str)]
    else:
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            for option in options if isinstance(options, list) else ():
                names.extend(_type_names(option))
    return [name for name in names if name != "null"]


def _parse_as(type_name: str, text: str, *, alone: bool) -> str:
    """alone: the schema names one type only, so a boolean that is not "true" is false rather than another type."""
    if type_name in _STRING_TYPES:
        return to_json(text)
    if type_name.startswith(_INTEGER_STARTS):
        return _integer(text)
    if type_name.startswith(_NUMBER_STARTS):
        return _number(text)
    if type_name in _BOOLEAN_TYPES:
        if not alone and text.lower() not in ("true", "false"):
            raise _NoParse
        return "true" if text.lower() == "true" else "false"
    if type_name in _JSON_TYPES or type_name.startswith(_JSON_STARTS):
        try:
            return to_json(json.loads(text))
        except (ValueError, RecursionError):
            return _python_literal(text)
    return _python_literal(text)


def _integer(text: str) -> str:
    if not _INTEGER_RE.fullmatch(text):
        raise _NoParse
    try:
        return str(int(text))
    except ValueError as err:  # more digits than Python converts
        raise _NoParse from err


def _number(text: str) -> str:
    if _INTEGER_RE.fullmatch(text):
        return _integer(text)
    if not _NUMBER_RE.fullmatch(text) or not math.isfinite(float(text)):
        raise _NoParse
    return to_json(float(text))


def _python_literal(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in what the model wrote
            return to_json(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as err:
        raise _NoParse from err
