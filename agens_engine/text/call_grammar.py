"""Tool calls as a grammar: only declared functions, their parameters in declared order, every value of its type.

    call    <|call|> "\\n" function+ <|/call|>                      (one function when parallel calls are off)
    function  "<function=NAME>\\n" parameters "</function>\\n"
    parameter "<parameter=ARG>\\n" VALUE "\\n</parameter>\\n"         (optional unless `required`)

A VALUE is written as tool_schema.value_json reads it back: strings raw, everything else as JSON. A string may not spell
a tag that would end it (and not `null`, which is read as null) and, of its schema, follows `enum`, `const` and the
lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agens_engine.errors import RequestError
from agens_engine.text.schema_refs import alone
from agens_engine.text.tool_schema import json_kinds, parameter_schema

WHITESPACE = r" |\n[ \t]{0,40}"  # between the parts of a JSON text; unbounded, a model can fill its answer with it
_LONGEST = 4096  # a longer maxLength is not enforced: it would make the grammar large, and the answer is long anyway
_TAGS = ("</parameter>", "<parameter=", "</function>")
_TEXT_END = "\n</parameter>\n"
TERMINALS = (
    r"TEXT: /(?s:.*)/ & ~/(?s:.*)(<\/parameter>|<parameter=|<\/function>)(?s:.*)/" "\n"
    r"TEXT_BUT_NULL: TEXT & ~/(?i:null)/" "\n"
)  # fmt: skip


@dataclass(frozen=True)
class CallPlan:
    """How tools may be called.

    tools      function tools in OpenAI's nested form
    required   the answer is a call (tool_choice required, or one named tool)
    parallel   more than one call may be made
    """

    tools: tuple[Mapping[str, Any], ...]
    required: bool
    parallel: bool = True


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A JSON schema inside a Lark grammar."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def call_rules(plan: CallPlan, call_start_id: int, call_end_id: int) -> str:
    """Lark rules; the one named `calls` is one answer's calls.

    raises   RequestError for a name that the call form cannot carry
    """
    lines: list[str] = []
    names = []
    for index, tool in enumerate(plan.tools):
        lines += _function_rules(f"f{index}", tool["function"])
        names.append(f"f{index}")
    lines.append(f"function: {' | '.join(names)}")
    several = "+" if plan.parallel else ""
    lines.append(f'call: <[{call_start_id}]> "\\n" function{several} <[{call_end_id}]>')
    lines.append("calls: call (GAP? call)*" if plan.parallel else "calls: call")
    lines.append(r"GAP: /[ \n]{1,2}/")
    return "\n".join(lines) + "\n" + TERMINALS


def _function_rules(rule: str, function: Mapping[str, Any]) -> list[str]:
    """Rules for one function; their names begin with `rule`."""
    name = _tag_name(function["name"], "function")
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = [r for r in required if isinstance(r, str)] if isinstance(required, list) else []
    properties |= {key: {} for key in required if key not in properties}
    strict = function.get("strict") is True
    lines, parts = [], []
    for index, (key, sub) in enumerate(properties.items()):
        part = f"{rule}p{index}"
        head = literal(f"<parameter={_tag_name(key, f'parameter of {name!r}')}>\n")
        lines += _value_rules(part, head, sub, schema, lenient=not strict)
        parts.append(part if key in required else f"{part}?")
    body = " ".join([literal(f"<function={name}>\n"), *parts, literal("</function>\n")])
    return [f"{rule}: {body}", *lines]


def _value_rules(part: str, head: str, schema: Any, root: Mapping[str, Any], *, lenient: bool) -> list[str]:
    """The rules of one parameter."""
    full = parameter_schema(schema, root)
    kinds = json_kinds(full)
    if "text" not in kinds:
        declared = full.get("type")
        if isinstance(declared, list) or (isinstance(declared, str) and declared != kinds[0]):
            full = {**full, "type": kinds if len(kinds) > 1 else kinds[0]}
        return [f"{part}: {head} {json_rule(alone(full, root), lenient=lenient)} {literal(_TEXT_END)}"]
    choices = _text_choices(full)
    if choices:
        return [f"{part}: {head} ({' | '.join(map(literal, choices))}) {literal(_TEXT_END)}"]
    text = "TEXT" if "null" in kinds else "TEXT_BUT_NULL"
    terminal = f"{part}v".upper()
    return [
        f"{part}: {head} {part}v",
        f"{part}v[suffix={literal(_TEXT_END)}]: {terminal}",
        f"{terminal}: {text}{_length(full)}",
    ]


def _length(schema: Any) -> str:
    """The part of a terminal that holds a string to its lengths."""
    low, high = (schema.get(key) if isinstance(schema, Mapping) else None for key in ("minLength", "maxLength"))
    first = low if isinstance(low, int) and 0 < low <= _LONGEST else 0
    last = high if isinstance(high, int) and first <= high <= _LONGEST else ""
    return f" & /(?s:.{{{first},{last}}})/" if first or last != "" else ""


def _text_choices(schema: Any) -> Sequence[str]:
    """The values of `enum` or `const` as they are written; none when there is no such list."""
    if not isinstance(schema, Mapping):
        return ()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [v if isinstance(v, str) else json.dumps(v) for v in values] if isinstance(values, list) else []
    return [text for text in texts if not any(tag in text for tag in _TAGS)]


def _tag_name(name: str, what: str) -> str:
    """A name goes into a tag as it is, and is stripped when it is read back."""
    if name != name.strip() or not name or any(c in name for c in ">\n\r"):
        raise RequestError(
            f"tools: the name of a {what}, {name[:60]!r}, cannot be written in a tool call; "
            "use one without '>', line breaks and outer spaces",
            param="tools",
        )
    return name
