"""Agent sessions: one to three calls with results in between, then an answer made from the results."""

from __future__ import annotations

import json
from typing import Any

from scripts.nano.document import Document, Message, assistant, assistant_calls, tool_result, user
from scripts.nano.kinds.toolbox import (
    READ_VERBS,
    Slot,
    ToolSpec,
    make_spec,
    request_text,
    schema_of,
    shown,
    thought_for,
    value_for,
)
from scripts.nano.kinds.tools import declare, start
from scripts.nano.lexicon import Sampler

DONE_WORDS = ("ok", "done", "saved", "sent", "created", "accepted", "queued")
FAILURES = ("not found", "access denied", "timeout", "no such file", "bad request", "server busy")
HOLDERS = ("user", "customer", "member", "account", "contact", "profile")
OWNED = ("orders", "tickets", "invoices", "tasks", "notes", "bookings", "payments", "jobs")


def make(s: Sampler) -> Document:
    """expect: content (exact last answer) and needs (strings from the results that it must hold)."""
    how = s.rng.random()
    if how < 0.3:
        return _one_call(s)
    if how < 0.6:
        return _chain(s)
    if how < 0.85:
        return _two_values(s)
    return _follow_up(s)


def _final(kind_verb: str, noun: str, value: str, result: str) -> str:
    if kind_verb in READ_VERBS:
        return f"The {noun} for {value}: {result}"
    return f"I did {kind_verb} the {noun}: {result}"


def _result(s: Sampler, spec: ToolSpec) -> tuple[str, str, bool]:
    """Raw result text, the part the answer repeats, and whether it is a failure."""
    if s.chance(0.1):
        reason = s.pick(FAILURES)
        return f"error: {reason}", reason, True
    if spec.verb not in READ_VERBS:
        word = s.pick(DONE_WORDS) if s.chance(0.6) else f"{s.pick(DONE_WORDS)} {s.ident()}"
        return word, word, False
    if spec.noun in ("weather", "forecast", "temperature"):
        text = f"{s.between(-9, 39)} C, {s.pick(('sun', 'rain', 'snow', 'wind', 'fog', 'clouds'))}"
    elif s.chance(0.35):
        text = f"{s.common()} {s.digits(1, 4)}"
    else:
        text = s.anything() if s.chance(0.6) else s.sentence()
    if s.chance(0.3):
        return json.dumps({spec.noun: text}, ensure_ascii=False), text, False
    return text, text, False


def _answer(spec: ToolSpec, value: str, part: str, failed: bool) -> str:
    return f"The tool failed: {part}" if failed else _final(spec.verb, spec.noun, value, part)


def _not_math(s: Sampler) -> ToolSpec:
    spec = make_spec(s, fixed_pair=True)
    while spec.noun == "math":
        spec = make_spec(s, fixed_pair=True)
    return spec


def _call_and_answer(s: Sampler, spec: ToolSpec, thinking: bool) -> tuple[list[Message], str, str]:
    values = {slot.name: value_for(s, slot) for slot in spec.slots}
    raw, part, failed = _result(s, spec)
    answer = _answer(spec, shown(values[spec.slots[0].name]), part, failed)
    thought = "The tool failed." if failed else "I have the result."
    messages = [
        user(request_text(s, spec, values)),
        assistant_calls([(spec.name, values)], thought=thought_for(spec.name, values), thinking=thinking),
        tool_result(raw),
        assistant(answer, thought=thought, thinking=thinking),
    ]
    return messages, answer, part


def _one_call(s: Sampler) -> Document:
    spec = _not_math(s)
    thinking = s.chance(0.6)
    messages, answer, part = _call_and_answer(s, spec, thinking)
    tools = declare(s, spec, s.between(0, 1))
    return Document("agent", [*start(s), *messages], tools, thinking, expect={"content": answer, "needs": [part]})


def _follow_up(s: Sampler) -> Document:
    """The user asks twice; the second time the same tool serves another value."""
    spec = _not_math(s)
    spec = ToolSpec(spec.verb, spec.noun, spec.name, spec.slots[:1])
    thinking = s.chance(0.6)
    first, _, _ = _call_and_answer(s, spec, thinking)
    second, answer, part = _call_and_answer(s, spec, thinking)
    if s.chance(0.5):
        call = second[1]["tool_calls"][0]["function"]["arguments"]
        second[0] = user(f"And {shown(call[spec.slots[0].name])}?")
    tools = [schema_of(s, spec)]
    return Document("agent", first + second, tools, thinking, expect={"content": answer, "needs": [part]})


def _two_values(s: Sampler) -> Document:
    """One request, two calls of the same tool, one after the other or side by side; the answer holds both results."""
    spec = _not_math(s)
    slot = spec.slots[0]
    spec = ToolSpec(spec.verb, spec.noun, spec.name, (slot,))
    thinking = s.chance(0.6)
    a, b = value_for(s, slot), value_for(s, slot)
    side_by_side = s.chance(0.3)
    text = request_text(s, spec, {slot.name: a}).rstrip(".? ").removesuffix(" please")
    text += f" and {shown(b)}." if side_by_side else f", then {s.pick(('for ', ''))}{shown(b)}."
    found = [_result(s, spec) for _ in range(2)]
    pairs = list(zip((a, b), found, strict=True))
    messages: list[Message] = [user(text)]
    if side_by_side:
        thought = f"Use {spec.name} twice, with {slot.name} {shown(a)} and {shown(b)}."
        messages.append(
            assistant_calls([(spec.name, {slot.name: v}) for v in (a, b)], thought=thought, thinking=thinking)
        )
        messages += [tool_result(raw) for raw, _, _ in found]
    else:
        for value, (raw, _, _) in pairs:
            arguments = {slot.name: value}
            messages.append(
                assistant_calls([(spec.name, arguments)], thought=thought_for(spec.name, arguments), thinking=thinking)
            )
            messages.append(tool_result(raw))
    answer = "\n".join(_answer(spec, shown(value), part, failed) for value, (_, part, failed) in pairs)
    messages.append(assistant(answer, thought="I have both results.", thinking=thinking))
    tools = [schema_of(s, spec)] if s.chance(0.6) else declare(s, spec, 1)
    return Document(
        "agent", messages, tools, thinking, expect={"content": answer, "needs": [part for _, part, _ in found]}
    )


def _chain(s: Sampler) -> Document:
    """The first result is the argument of the second call."""
    holder, owned = s.pick(HOLDERS), s.pick(OWNED)
    verb = s.pick(("find", "get", "fetch", "load", "show", "list"))
    second_verb = s.pick(("get", "list", "fetch", "count", "show"))
    key = Slot(s.pick(("name", "user", "person")), "person", True) if s.chance(0.6) else Slot("email", "email", True)
    id_name = s.pick(("id", f"{holder}_id", "number"))
    first = ToolSpec(verb, holder, f"{verb}_{holder}", (key,))
    second = ToolSpec(second_verb, owned, f"{second_verb}_{owned}", (Slot(id_name, "id", True),))
    if s.chance(0.2):
        first = ToolSpec(verb, holder, verb + holder.capitalize(), first.slots)
        second = ToolSpec(second_verb, owned, second_verb + owned.capitalize(), second.slots)
    who, number = value_for(s, key), int(s.digits(2, 5))
    outcome = f"{s.between(0, 40)} {owned}" if s.chance(0.5) else s.anything()
    thinking = s.chance(0.6)
    tools = [schema_of(s, first), schema_of(s, second)]
    if s.chance(0.5):
        tools.reverse()
    args_1: dict[str, Any] = {key.name: who}
    args_2: dict[str, Any] = {id_name: number}
    raw = json.dumps({"id": number}) if s.chance(0.6) else s.pick((f"id: {number}", str(number), f"id={number}"))
    ask = s.pick(
        ("{v} the {o} of {w}.", "What {o} does {w} have?", "Please {l} the {o} of {w}.", "Which {o} belong to {w}?")
    )
    answer = f"The {owned} of {who}: {outcome}"
    messages = [
        *start(s),
        user(ask.format(v=second_verb.capitalize(), l=second_verb, o=owned, w=who)),
        assistant_calls(
            [(first.name, args_1)], thought=f"First find the id. {thought_for(first.name, args_1)}", thinking=thinking
        ),
        tool_result(raw),
        assistant_calls(
            [(second.name, args_2)],
            thought=f"The id is {number}. {thought_for(second.name, args_2)}",
            thinking=thinking,
        ),
        tool_result(outcome),
        assistant(answer, thought="I have the result.", thinking=thinking),
    ]
    return Document("agent", messages, tools, thinking, expect={"content": answer, "needs": [outcome]})
