"""Dense copying: repeat a text, look up the value of a key, copy a line. Most answers are open-vocabulary."""

from __future__ import annotations

from scripts.nano.document import Document, Message, assistant, user
from scripts.nano.kinds import python_code
from scripts.nano.lexicon import Sampler

REPEATS = (
    "Repeat: {}",
    "Repeat after me: {}",
    "Say {}",
    "Repeat this: {}",
    "Copy: {}",
    "Echo {}",
    "Write {}",
    "Please repeat {}",
)
KEYS = (
    "name", "email", "path", "city", "url", "code", "title", "id", "date", "key", "color", "file", "user", "host",
    "topic", "owner", "place", "token", "note", "label",
)  # fmt: skip


def make(s: Sampler) -> Document:
    """expect["content"] is the exact last answer."""
    how = s.rng.random()
    if how < 0.34:
        return _repeat(s)
    if how < 0.84:
        return _lookup(s)
    if how < 0.92:
        return _select(s)
    return _lines(s)


def _close(s: Sampler, turns: list[tuple[str, str]], thinking: bool) -> Document:
    messages: list[Message] = []
    for question, answer in turns:
        messages += [user(question), assistant(answer, thought=f"Copy {answer}" if thinking else "", thinking=thinking)]
    return Document("copying", messages, None, thinking, expect={"content": turns[-1][1]})


def _repeat(s: Sampler) -> Document:
    turns = []
    for _ in range(s.between(1, 4)):
        how = s.rng.random()
        if how < 0.45:
            text = s.anything()
        elif how < 0.8:
            text = " ".join(s.word() for _ in range(s.between(3, 10)))
        elif how < 0.9:
            text = s.sentence()
        else:
            text = ", ".join(s.anything() for _ in range(s.between(2, 5)))
        turns.append((s.pick(REPEATS).format(text), text))
    return _close(s, turns, s.chance(0.15))


def _lookup(s: Sampler) -> Document:
    """Facts first, then one question after the other about them."""
    long = s.chance(0.12)  # long lists push the facts out of the attention window
    num = s.between(8, 14) if long else s.between(2, 6)
    words_as_keys = s.chance(0.5)
    keys: list[str] = []
    while len(keys) < num:
        key = s.word() if words_as_keys else s.pick(KEYS)
        if key not in keys:
            keys.append(key)
    values = [s.anything() for _ in keys]
    glue, separator, question = _forms(s)
    facts = separator.join(glue.format(k=key, v=value) for key, value in zip(keys, values, strict=True))
    asked = s.rng.sample(range(num), s.between(2, min(num, 6)))
    turns = []
    for position, which in enumerate(asked):
        text = question.format(k=keys[which])
        if position == 0:
            text = f"{facts}{s.pick((chr(10), ' ')) if separator != chr(10) else chr(10)}{text}"
        turns.append((text, values[which]))
    return _close(s, turns, s.chance(0.2))


def _forms(s: Sampler) -> tuple[str, str, str]:
    glue = s.pick(("{k} is {v}.", "{k}: {v}", "{k} = {v}", "{k}={v}", "{k} -> {v}", "The {k} is {v}.", '"{k}": "{v}"'))
    separator = " " if glue.endswith(".") else s.pick(("\n", "\n", ", ", "; "))
    question = s.pick(
        ("What is {k}?", "What is the {k}?", "{k}?", "Give me {k}.", "Value of {k}?", "And {k}?", "Find {k}.")
    )
    return glue, separator, question


def _select(s: Sampler) -> Document:
    items = [s.anything() if s.chance(0.5) else s.word() for _ in range(s.between(2, 6))]
    listed = s.pick((", ", "\n", " | ")).join(items)
    turns: list[tuple[str, str]] = []
    for which in s.rng.sample(("first", "last", "second"), s.between(1, 3)):
        answer = items[{"first": 0, "last": -1, "second": 1}[which]]
        text = s.pick(("What is the {} item?", "Give me the {} one.", "Which one is {}?")).format(which)
        turns.append((text if turns else f"{listed}\n{text}", answer))
    return _close(s, turns, s.chance(0.2))


def _lines(s: Sampler) -> Document:
    how = s.rng.random()
    if how < 0.5:
        text = python_code.line(s)
    elif how < 0.75:
        text = "\n".join(s.anything() for _ in range(s.between(2, 4)))
    else:
        text = python_code.function(s)[1]
    return _close(
        s, [(s.pick(("Copy this:\n{}", "Repeat this exactly:\n{}", "Copy the text:\n{}")).format(text), text)], False
    )
