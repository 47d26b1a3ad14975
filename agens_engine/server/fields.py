"""Typed reading of a JSON body: bytes -> object, then one field at a time; every error names the field.

Types are strict (true is not 1, "5" is not 5, but 5 is a number); null and absent are the same.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from agens_engine.errors import RequestError

log = logging.getLogger(__name__)


def parse_body(body: bytes) -> dict[str, Any]:
    """A request body as a JSON object, every string of it encodable.

    raises   RequestError for anything JSON itself forbids (NaN literals, too)
    """
    if not body.strip():
        raise RequestError("the request body is empty; send a JSON object", code="invalid_json")
    try:
        # decoded here: json would let half a surrogate pair through as three raw bytes, and accept UTF-16
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\ud" in body or b"\\uD" in body:
            value = _without_half_pairs(value)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise RequestError("the request body is not valid UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, not {type_name(value)}", code="invalid_json")
    return value


def _without_half_pairs(value: Any) -> Any:
    """Half a surrogate pair, written as an escape, is no character and cannot be encoded: U+FFFD stands in for it."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _refuse_constant(literal: str) -> NoReturn:
    raise RequestError(f"the request body is not valid JSON: {literal} is not a JSON number", code="invalid_json")


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise RequestError(f"the request body holds {literal}; numbers must be finite", code="invalid_json")
    return number


def type_name(value: Any) -> str:
    """A JSON value's type in JSON's own words."""
    if value is None:
        return "null"
    for kinds, name in ((bool, "a boolean"), (int | float, "a number"), (str, "a string"), (list, "a list")):
        if isinstance(value, kinds):
            return name
    return "an object"


def wrong(param: str, allowed: str, value: Any, *, code: str | None = None) -> RequestError:
    """The error for a field whose value is not allowed; short scalars are shown, the rest named by type."""
    if isinstance(value, str) and len(value) > 60:
        shown = f"a string of {len(value)} characters"
    elif isinstance(value, bool | int | float | str):
        shown = json.dumps(value)[:80]
    else:
        shown = type_name(value)
    return RequestError(f"{param} must be {allowed}, not {shown}", param=param, code=code)


class Fields:
    """One JSON object being read. `path` is its place in the body and leads every error (`tools[0].function`).

    names   what the client calls a field whose key here is another, for bodies translated from another dialect
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", names: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.path = path
        self._names = names or {}
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        key = self._names.get(key, key)
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        self._read.add(key)
        return self.values.get(key)

    def text(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def items(self, key: str) -> list[Any] | None:
        return self._typed(key, list, "a list")

    def object(self, key: str) -> dict[str, Any] | None:
        return self._typed(key, dict, "an object")

    def whole(self, key: str, *, low: int | None = None, high: int | None = None) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(self.name(key), "a whole number", value)
        if (low is not None and value < low) or (high is not None and value > high):
            raise wrong(self.name(key), f"between {low} and {high}" if high is not None else f"at least {low}", value)
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(self.name(key), "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise RequestError(f"{self.name(key)} must be a finite number", param=self.name(key))
        return number

    def refuse(self, key: str, message: str) -> NoReturn:
        raise RequestError(message, param=self.name(key))

    def warn_unread(self, known: Iterable[str] = ()) -> None:
        """Log the fields nobody asked for; clients send many that mean nothing here."""
        unknown = sorted(set(self.values) - self._read - set(known))
        if unknown:
            log.debug("ignored request fields: %s", ", ".join(unknown))

    def _typed(self, key: str, kind: type, allowed: str) -> Any:
        value = self.get(key)
        if value is not None and not isinstance(value, kind):
            raise wrong(self.name(key), allowed, value)
        return value
