"""A number and its derivation in one object, so that the words beside a line can never differ from its bytes.

    Formula.of((17, "BCSA layers"), (6144, "ring positions"), (2, "K and V"), (1024, "values"), (2, "bytes"))
    .value   427819008
    .text()  "17 BCSA layers × 6,144 ring positions × 2 K and V × 1,024 values × 2 bytes"

A formula is a sum of products. Factors are whole numbers or exact fractions (2.82 bits = 282/100); the sum is rounded
up once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = int | Fraction
Factor = tuple[Number, str]


@dataclass(frozen=True, slots=True)
class Formula:
    """Sum of products of labelled factors, with an optional remark that does not change the value."""

    terms: tuple[tuple[Factor, ...], ...] = ()
    remark: str = ""

    @staticmethod
    def of(*factors: Factor, remark: str = "") -> Formula:
        return Formula((factors,), remark)

    def __add__(self, other: Formula) -> Formula:
        remark = "; ".join(r for r in (self.remark, other.remark) if r)
        return Formula(self.terms + other.terms, remark)

    @property
    def value(self) -> int:
        """Bytes, rounded up to a whole number."""
        total: Number = 0
        for term in self.terms:  # plain loops: a search evaluates this some hundred times
            product: Number = 1
            for number, _ in term:
                product *= number
            total += product
        return math.ceil(total)

    def text(self) -> str:
        """The derivation in words; a term led by the factor −1 is subtracted, terms of 0 are left out."""
        body = ""
        for term in self.terms:
            if not _is_zero(term):
                negative = term[0][0] == -1
                joint = (" − " if negative else " + ") if body else ("−" if negative else "")
                body += joint + " × ".join(_factor_text(f) for f in term[negative:])
        if not body:
            return self.remark or "nothing"
        return f"{body} ({self.remark})" if self.remark else body


def _is_zero(term: tuple[Factor, ...]) -> bool:
    return any(number == 0 for number, _ in term)


def _factor_text(factor: Factor) -> str:
    number, label = factor
    if isinstance(number, Fraction) and number.denominator != 1:
        shown = f"{number.numerator}/{number.denominator}" if number < 1 else f"{float(number):.10g}"
    else:
        shown = f"{int(number):,}"
    return f"{shown} {label}" if label else shown
