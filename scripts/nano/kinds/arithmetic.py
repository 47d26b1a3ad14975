"""Addition, subtraction and multiplication with written steps.

A thought restates the task and then works column by column from the right; after each column the digits found so
far are written again, so the last one is the answer (less leading zeros):

    427+86: 7+6+0=13 -> 3; 2+8+1=11 -> 13; 4+0+1=5 -> 513
    63-7: 13-7-0=6 -> 6; 6-0-1=5 -> 56                 a borrow shows as the ten in front of the column's digit
    63*7: 3*7=21, 21+0=21 -> 1; 6*7=42, 42+2=44 -> 441  product and carry are two separate steps
    23*14: 23*4: ... -> 92; 23*10: 230; 92+230: ... -> 322

Subtractions never go below zero.
"""

from __future__ import annotations

from scripts.nano.document import SYSTEM_TEXTS, Document, Message, assistant, user
from scripts.nano.lexicon import Sampler, is_held

ASKS = {
    "+": ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}=", "Add {a} and {b}.", "Calculate {a} + {b}.", "{a} plus {b}",
          "What is {a} plus {b}?", "What is the sum of {a} and {b}?", "How much is {a} + {b}?", "{a}+{b}",
          "{a} + {b} = ?", "What is {a}+{b}?"),
    "-": ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}=", "Subtract {b} from {a}.", "Calculate {a} - {b}.",
          "{a} minus {b}", "What is {a} minus {b}?", "How much is {a} - {b}?", "{a}-{b}", "Take {b} from {a}.",
          "{a} - {b} = ?", "What is {a}-{b}?"),
    "*": ("What is {a} * {b}?", "{a} * {b}", "{a}*{b}=", "Multiply {a} by {b}.", "Calculate {a} * {b}.",
          "{a} times {b}", "What is {a} times {b}?", "How much is {a} * {b}?", "{a}*{b}", "What is {a} x {b}?",
          "{a} * {b} = ?", "What is {a}*{b}?"),
}  # fmt: skip
STORIES = {
    "+": (
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have?",
        "There are {a} {t}, then {b} {t} come. How many?",
    ),
    "-": (
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "There are {a} {t}, {b} of them go. How many are left?",
    ),
    "*": ("{n} has {b} boxes with {a} {t} each. How many {t} is that?", "How many {t} are in {b} bags of {a}?"),
}
THINGS = ("apples", "books", "coins", "cards", "stones", "pears", "keys", "cups", "balls", "hats")


def add_steps(a: int, b: int) -> str:
    """Column addition, as drawn in the module docstring, without the leading "a+b: "."""
    left, right = str(a), str(b)
    width = max(len(left), len(right))
    left, right = left.zfill(width), right.zfill(width)
    carry, found, parts = 0, "", []
    for column in range(width - 1, -1, -1):
        total = int(left[column]) + int(right[column]) + carry
        digit = str(total) if column == 0 else str(total % 10)
        found = digit + found
        parts.append(f"{left[column]}+{right[column]}+{carry}={total} -> {found}")
        carry = total // 10
    return "; ".join(parts)


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction for a >= b; the last number may carry leading zeros."""
    left = str(a)
    right = str(b).zfill(len(left))
    borrow, found, parts = 0, "", []
    for column in range(len(left) - 1, -1, -1):
        upper, lower = int(left[column]), int(right[column])
        needs = upper - lower - borrow < 0
        digit = upper - lower - borrow + (10 if needs else 0)
        found = str(digit) + found
        parts.append(f"{'1' if needs else ''}{upper}-{lower}-{borrow}={digit} -> {found}")
        borrow = int(needs)
    return "; ".join(parts)


def multiply_steps(a: int, b: int) -> str:
    """Multiplication of a number by one digit, product and carry in two steps per column."""
    carry, found, parts = 0, "", []
    digits = str(a)
    for column in range(len(digits) - 1, -1, -1):
        product = int(digits[column]) * b
        total = product + carry
        found = (str(total) if column == 0 else str(total % 10)) + found
        parts.append(f"{digits[column]}*{b}={product}, {product}+{carry}={total} -> {found}")
        carry = total // 10
    return "; ".join(parts)


def steps(a: int, op: str, b: int) -> str:
    """The full thought for a task, starting with the task itself."""
    if op == "+":
        return f"{a}+{b}: {add_steps(a, b)}"
    if op == "-":
        return f"{a}-{b}: {subtract_steps(a, b)}"
    if b < 10:
        return f"{a}*{b}: {multiply_steps(a, b)}"
    if a < 10:
        return f"{a}*{b}: {steps(b, '*', a)}"
    low, high = b % 10, b // 10
    first, second = a * low, a * high * 10
    return f"{a}*{b}: {steps(a, '*', low)}; {steps(a, '*', high)}; {steps(first, '+', second)}"


def result_of(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def make(s: Sampler) -> Document:
    """expect: op, a, b and result of the last task."""
    if s.chance(0.08) and s.split == "train":
        return _fact(s)
    op = s.pick(("+", "+", "-", "-", "*", "*", "*"))
    a, b = _numbers(s, op)
    thinking = s.chance(0.85)
    messages: list[Message] = []
    if s.chance(0.1):
        messages.append({"role": "system", "content": s.pick(SYSTEM_TEXTS)})
    messages += _exchange(s, a, op, b, thinking)
    if s.chance(0.25) and b < 100:
        op = s.pick(("+", "-", "*"))
        a, b = _numbers(s, op)
        messages += _exchange(s, a, op, b, thinking)
    return Document(
        "arithmetic", messages, None, thinking, expect={"op": op, "a": a, "b": b, "result": result_of(a, op, b)}
    )


def _exchange(s: Sampler, a: int, op: str, b: int, thinking: bool) -> list[Message]:
    thought = steps(a, op, b)
    answer = f"The answer is {result_of(a, op, b)}."
    if not thinking and max(a, b) >= 10:
        answer = f"{thought}\n{answer}"  # no thinking block to work in, so the steps go into the answer
    return [user(_question(s, a, op, b)), assistant(answer, thought=thought, thinking=thinking)]


def _question(s: Sampler, a: int, op: str, b: int) -> str:
    if s.chance(0.12):
        return s.pick(STORIES[op]).format(a=a, b=b, n=s.name(), t=s.pick(THINGS))
    return s.pick(ASKS[op]).format(a=a, b=b)


def _numbers(s: Sampler, op: str) -> tuple[int, int]:
    """Two numbers on this split's side of the held-out rule; tasks of two single digits are always trainable."""
    while True:
        if op == "*":
            a, b = _factors(s)
        else:
            a, b = (_number(s), _number(s)) if s.chance(0.6) else _same_length(s)
            if op == "-" and a < b:
                a, b = b, a
        if max(a, b) < 10:
            if s.split == "train":
                return a, b
            continue
        if is_held("numbers", f"{a}{op}{b}") == s.held_wanted:
            return a, b


def _number(s: Sampler) -> int:
    how = s.rng.random()
    num = 1 if how < 0.2 else 2 if how < 0.62 else 3 if how < 0.88 else 4
    return int(s.digits(num, num)) if num > 1 else s.between(0, 9)


def _same_length(s: Sampler) -> tuple[int, int]:
    num = 2 if s.chance(0.55) else 3 if s.chance(0.7) else 4
    return int(s.digits(num, num)), int(s.digits(num, num))


def _factors(s: Sampler) -> tuple[int, int]:
    how = s.rng.random()
    if how < 0.12:
        return s.between(0, 9), s.between(0, 9)
    if how < 0.72:
        return s.between(10, 99), s.between(0, 9) if s.chance(0.1) else s.between(2, 9)
    if how < 0.82:
        return s.between(100, 999), s.between(2, 9)
    if how < 0.9:
        return s.between(2, 9), s.between(10, 99)
    return s.between(11, 99), s.between(11, 99)


def _fact(s: Sampler) -> Document:
    """Several single-digit facts answered at once, drilled evenly; anything larger always gets written steps."""
    messages: list[Message] = []
    op, a, b, result = "+", 0, 0, 0
    for _ in range(s.between(2, 4)):
        op = s.pick(("+", "-", "*", "*"))
        a, b = s.between(0, 9), s.between(0, 9)
        if op == "-":
            a, b = max(a, b), min(a, b)
        result = result_of(a, op, b)
        messages += [
            user(s.pick(ASKS[op][:3]).format(a=a, b=b)),
            assistant(f"The answer is {result}.", thought="", thinking=False),
        ]
    return Document("arithmetic", messages, None, False, expect={"op": op, "a": a, "b": b, "result": result})
