"""Typed access to a drafter's config.json, with tensor shapes standing in for keys that are absent.

Sections nested in the object win over the top level. Every failure names the file, the key and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agens_engine.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


def merge_sections(raw: Mapping[str, Any], sections: Sequence[str], where: str) -> dict[str, Any]:
    """The top-level keys, overlaid by those of each named section that is there, the last one winning."""
    merged = dict(raw)
    for name in sections:
        section = raw.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ConfigError(f"{where}: {name} must be an object, not {section!r}")
        merged.update(section)
    return merged


@dataclass(frozen=True)
class DrafterKeys:
    """The merged keys of one config.json; `where` is how errors call the file, `shapes` the drafter's own tensors.

    A key that is null counts as absent.
    """

    values: Mapping[str, Any]
    where: str
    shapes: Shapes = field(default_factory=dict)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing, and the tensors do not tell it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.fail(f"{key} must be an integer of at least {at_least}, not {value!r}")
        return value

    def from_shape(self, tensor: str, axis: int, divisor: int = 1) -> int | None:
        """A size the config may leave out: one axis of a tensor over a divisor; None when it cannot be told."""
        shape = self.shapes.get(tensor)
        if shape is None or axis >= len(shape) or divisor <= 0 or shape[axis] % divisor:
            return None
        return shape[axis] // divisor or None

    def number(self, key: str, default: float, *, positive: bool = True) -> float:
        value = self.get(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise self.fail(f"{key} must be a finite number, not {value!r}")
        if positive and value <= 0:
            raise self.fail(f"{key} must be above 0, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, not {value!r}")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> None:
        """Refuse a value other than those allowed; absent is fine."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.fail(f"{key} {value!r} is not supported; {' or '.join(allowed)} is")

    def rope(self, default_theta: float, default_factor: float = 1.0) -> tuple[float, float, tuple[int, ...]]:
        """theta, the rotated fraction of the head, and the 3-axis sections (for images; empty when not given).

        Nested rope_parameters (or rope_scaling) win over the flat keys.
        """
        rope: dict[str, Any] = {k: self.get(k) for k in ("rope_theta", "partial_rotary_factor")}
        for name in ("rope_scaling", "rope_parameters"):
            nested = self.get(name)
            if nested is None:
                continue
            if not isinstance(nested, Mapping):
                raise self.fail(f"{name} must be an object, not {nested!r}")
            rope.update(nested)
        keys = DrafterKeys(rope, self.where)
        keys.choice("rope_type", ("default",))
        keys.choice("type", ("default",))
        section = rope.get("mrope_section") or ()
        return (
            keys.number("rope_theta", default_theta),
            keys.number("partial_rotary_factor", default_factor),
            tuple(section),
        )


def target_misfits(pairs: Mapping[str, tuple[int | None, int]]) -> list[str]:
    """One sentence per size that differs. pairs: name -> (the drafter's or None when it has none, the target's)."""
    return [
        f"{name} is {own}, the target model's is {target}"
        for name, (own, target) in pairs.items()
        if own is not None and own != target
    ]
