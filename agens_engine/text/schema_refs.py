"""Sub-schemas of a JSON schema: where they are, and what a local `$ref` among them means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "if", "then", "else", "propertyNames")
_MAX_HOPS = 16  # a chain of references longer than this is a circle


def sub_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The direct sub-schemas that are objects, each with its path below this one (`properties.city`, `anyOf[1]`)."""
    for key in _MAPS:
        found = schema.get(key)
        for name, sub in found.items() if isinstance(found, Mapping) else ():
            if isinstance(sub, Mapping):
                yield f"{key}.{name}", sub
    for key in _LISTS:
        found = schema.get(key)
        for index, sub in enumerate(found if isinstance(found, list) else ()):
            if isinstance(sub, Mapping):
                yield f"{key}[{index}]", sub
    for key in _SINGLE:
        sub = schema.get(key)
        if isinstance(sub, Mapping):
            yield key, sub


def alone(sub: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A sub-schema that can stand by itself: with the definitions of the schema it comes from."""
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **sub}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a local `$ref` leads to (its siblings win); anything else, or a broken one, as it is."""
    for _ in range(_MAX_HOPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return schema
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema
