"""Sizes as people write them, to and from bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from agens_planner.errors import PlannerInputError, nearest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
MAX_BYTES = 64 * TIB  # beyond this a number is a typing error, not a machine


def parse_size(value: str | int, where: str = "size") -> int:
    """Bytes from `14GiB`, `512MiB`, `16GB`, `1.5 GiB`, or a plain number of bytes.

    GiB = 2**30 and GB = 10**9; the case of the unit does not matter. A fraction of a byte is rounded down.
    raises  PlannerInputError naming `where`: not a size, an unknown unit, negative, or above 64 TiB
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise PlannerInputError(f"{where} must be a size such as 14GiB or 512MiB, not {value!r}")
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise PlannerInputError(f"{where} must be a size such as 14GiB or 512MiB, not {value!r}")
    number, unit = match.groups()
    if unit and unit.lower() not in _BY_LOWER:
        raise PlannerInputError(f"{where}: unknown unit {unit!r} in {value!r}{nearest(unit, _UNITS)}")
    size = int(Fraction(number.replace("_", "")) * (_BY_LOWER[unit.lower()] if unit else 1))
    if not 0 <= size <= MAX_BYTES:
        raise PlannerInputError(f"{where} must be between 0 and 64 TiB, not {value}")
    return size


def format_size(size: int) -> str:
    """`15.23 GiB`, `408.0 MiB`, `12.5 KiB`, `96 B`: binary units, for people."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if size >= unit:
            return f"{sign}{size / unit:.{digits}f} {name}"
    return f"{sign}{size} B"
