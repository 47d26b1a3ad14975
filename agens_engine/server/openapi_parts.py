"""Words of the OpenAPI document's schemas: the kinds of fields, and how objects are put together from them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
NUMBER: Schema = {"type": ["number", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
NAME: Schema = {"type": "string", "minLength": 1}
NULL: Schema = {"type": "null"}
OFF: Schema = {"enum": [None, False, []]}  # known elsewhere, not supported here: only allowed when it asks for nothing
NOT_TRUE: Schema = {"enum": [None, False]}
EXPRESSION: Schema = {"type": ["string", "null"], "minLength": 1}
SCHEMA_OR_TEXT: Schema = {"type": ["object", "string", "null"]}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def whole(low: int, high: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


def between(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def several(items: Schema, *, low: int = 0, high: int | None = None) -> Schema:
    limits = {**({"minItems": low} if low else {}), **({} if high is None else {"maxItems": high})}
    return {"type": "array", "items": items, **limits}


def any_of(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


def record(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object that may hold more than is listed."""
    return {"type": "object", "required": list(required), "properties": properties}
