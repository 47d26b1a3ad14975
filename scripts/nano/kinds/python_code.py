"""Small Python functions from a family of templates with varied names, operators and numbers."""

from __future__ import annotations

from scripts.nano.document import Document, assistant, user
from scripts.nano.lexicon import Sampler

ARGUMENTS = ("a", "b", "x", "y", "n", "value", "left", "right", "first", "second", "number", "item")
SEQUENCES = ("items", "values", "numbers", "words", "data", "rows", "xs")
OPERATORS = {"adds": "+", "subtracts": "-", "multiplies": "*", "divides": "/"}
TESTS = {"greater than": ">", "less than": "<", "equal to": "==", "at least": ">=", "at most": "<="}
REDUCERS = {
    "the sum of": "sum({s})", "the largest of": "max({s})", "the smallest of": "min({s})", "the length of": "len({s})",
    "a sorted copy of": "sorted({s})", "the first of": "{s}[0]", "the last of": "{s}[-1]",
    "a reversed copy of": "{s}[::-1]", "the unique": "set({s})", "the mean of": "sum({s}) / len({s})",
}  # fmt: skip
TEXT_WORK = {
    "upper case": "text.upper()", "lower case": "text.lower()", "title case": "text.title()", "reverse": "text[::-1]",
    "words": "text.split()", "stripped form": "text.strip()",
}  # fmt: skip
HEADS = (
    "Write a Python function {} that ",
    "Write a function {} that ",
    "Python function {} that ",
    "Define {}, which ",
)


def function(s: Sampler) -> tuple[str, str]:
    """A request (without the code fence) and the source it asks for."""
    name = _name(s)
    how = s.between(0, 8)
    head = s.pick(HEADS).format(name)
    if how <= 1:
        verb = s.pick(list(OPERATORS))
        a, b = _two(s)
        return f"{head}{verb} {a} and {b}.", f"def {name}({a}, {b}):\n    return {a} {OPERATORS[verb]} {b}"
    if how == 2:
        a, num = s.pick(ARGUMENTS), s.between(2, 99)
        verb = s.pick(list(OPERATORS))
        return f"{head}takes {a} and {verb} {num}.", f"def {name}({a}):\n    return {a} {OPERATORS[verb]} {num}"
    if how == 3:
        a, num, test = s.pick(ARGUMENTS), s.between(0, 99), s.pick(list(TESTS))
        return f"{head}tells if {a} is {test} {num}.", f"def {name}({a}):\n    return {a} {TESTS[test]} {num}"
    if how == 4:
        a, parity = s.pick(ARGUMENTS), s.pick(("even", "odd"))
        return f"{head}tells if {a} is {parity}.", f"def {name}({a}):\n    return {a} % 2 == {int(parity == 'odd')}"
    if how == 5:
        items, what = s.pick(SEQUENCES), s.pick(list(REDUCERS))
        return f"{head}returns {what} {items}.", f"def {name}({items}):\n    return {REDUCERS[what].format(s=items)}"
    if how == 6:
        items, num, test = s.pick(SEQUENCES), s.between(0, 99), s.pick(list(TESTS))
        body = f"    return [x for x in {items} if x {TESTS[test]} {num}]"
        return f"{head}keeps the {items} {test} {num}.", f"def {name}({items}):\n{body}"
    if how == 7:
        what = s.pick(list(TEXT_WORK))
        return f"{head}returns the {what} of text.", f"def {name}(text):\n    return {TEXT_WORK[what]}"
    items = s.pick(SEQUENCES)
    body = f"    for item in {items}:\n        print(item)"
    return f"{head}prints the {items} one by one.", f"def {name}({items}):\n{body}"


def line(s: Sampler) -> str:
    """One line of code, for copying."""
    how = s.between(0, 4)
    if how == 0:
        return f"{s.word()} = {s.word()}({s.word()}, {s.digits(1, 3)})"
    if how == 1:
        return f'{s.word()} = "{s.anything()}"'
    if how == 2:
        return f"if {s.word()}.{s.word()} > {s.digits(1, 4)}:"
    if how == 3:
        return f"from {s.word()} import {s.word()}, {s.word()}"
    return f"{s.word()}[{s.digits(1, 2)}] += {s.word()}_{s.word()}"


def make(s: Sampler) -> Document:
    """expect["code"] is the exact source without its fence."""
    request, code = function(s)
    thinking = s.chance(0.5)
    name = code[4 : code.index("(")]
    turn = assistant(f"```python\n{code}\n```", thought=f"Define {name}.", thinking=thinking)
    return Document("python", [user(request), turn], None, thinking, expect={"code": code})


def _name(s: Sampler) -> str:
    if s.chance(0.4):
        return s.split_draw("function", lambda: f"{s.pick(VERBS)}_{s.pick(THINGS)}")
    return s.word() if s.chance(0.5) else f"{s.word()}_{s.pick((s.word(), s.common()))}"


def _two(s: Sampler) -> tuple[str, str]:
    a, b = s.rng.sample(ARGUMENTS, 2)
    return a, b


VERBS = ("compute", "make", "check", "is", "do", "run", "find", "count", "filter", "combine", "get", "apply")
THINGS = ("total", "value", "ok", "items", "result", "score", "text", "price", "list", "numbers", "pair", "data")
