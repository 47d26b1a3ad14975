"""Single-turn tool prompts: one call, two parallel calls, or no call because none fits or none is needed."""

from __future__ import annotations

from typing import Any

from scripts.nano.document import SYSTEM_TEXTS, Document, Message, assistant, assistant_calls, user
from scripts.nano.kinds import chat
from scripts.nano.kinds.toolbox import ToolSpec, make_spec, request_text, schema_of, shown, thought_for, value_for
from scripts.nano.lexicon import Sampler

NO_TOOL_TEXT = "I have no tool for that."


def make(s: Sampler) -> Document:
    """One tool document; expect holds `calls` (list of [name, arguments]) and, without calls, `content`."""
    how = s.rng.random()
    if how < 0.80:
        return _call(s)
    if how < 0.86:
        return _parallel(s)
    if how < 0.93:
        return _plain_answer(s)
    return _no_fitting_tool(s)


def declare(s: Sampler, target: ToolSpec, num_others: int) -> list[dict[str, Any]]:
    """The target among other tools, in random order."""
    specs = [target]
    for _ in range(num_others):
        avoid = frozenset(spec.noun for spec in specs)
        spec = make_spec(s, avoid=avoid)
        if s.chance(0.2) and target.noun != "math" and spec.noun != "math":  # same verb, another noun: harder to choose
            spec = ToolSpec(target.verb, spec.noun, f"{target.verb}_{spec.noun}", spec.slots)
        if all(spec.name != other.name for other in specs):
            specs.append(spec)
    s.rng.shuffle(specs)
    return [schema_of(s, spec) for spec in specs]


def start(s: Sampler) -> list[Message]:
    """The opening system message, when there is one."""
    if s.chance(0.03):
        return [{"role": "system", "content": s.sentence()}]
    return [{"role": "system", "content": s.pick(SYSTEM_TEXTS)}] if s.chance(0.12) else []


def _call(s: Sampler) -> Document:
    spec = make_spec(s, fixed_pair=True)
    values = {slot.name: value_for(s, slot) for slot in spec.slots if slot.required or s.chance(0.4)}
    thinking = s.chance(0.55)
    tools = declare(s, spec, s.between(0, 2))
    turn = assistant_calls([(spec.name, values)], thought=thought_for(spec.name, values), thinking=thinking)
    messages = [*start(s), user(request_text(s, spec, values)), turn]
    return Document("tools", messages, tools, thinking, expect={"calls": [[spec.name, values]]})


def _parallel(s: Sampler) -> Document:
    spec = make_spec(s, fixed_pair=True)
    while spec.noun == "math":
        spec = make_spec(s, fixed_pair=True)
    slot = spec.slots[0]
    spec = ToolSpec(spec.verb, spec.noun, spec.name, (slot,))
    first, second = value_for(s, slot), value_for(s, slot)
    text = request_text(s, spec, {slot.name: first}).rstrip(".? ")
    text = text.removesuffix(" please") + f" and {s.pick(('also ', '', ''))}{shown(second)}."
    calls = [(spec.name, {slot.name: first}), (spec.name, {slot.name: second})]
    thinking = s.chance(0.55)
    thought = f"Use {spec.name} twice, with {slot.name} {shown(first)} and {shown(second)}."
    messages = [*start(s), user(text), assistant_calls(calls, thought=thought, thinking=thinking)]
    tools = declare(s, spec, s.between(0, 1))
    return Document("tools", messages, tools, thinking, expect={"calls": [list(call) for call in calls]})


def _plain_answer(s: Sampler) -> Document:
    thinking = s.chance(0.5)
    question, thought, answer = chat.exchange(s)
    tools = declare(s, make_spec(s), s.between(0, 2))
    messages = [*start(s), user(question), assistant(answer, thought=thought, thinking=thinking)]
    return Document("tools", messages, tools, thinking, expect={"calls": [], "content": answer})


def _no_fitting_tool(s: Sampler) -> Document:
    wanted = make_spec(s, fixed_pair=True)
    while wanted.noun == "math":
        wanted = make_spec(s, fixed_pair=True)
    values = {slot.name: value_for(s, slot) for slot in wanted.slots}
    text = request_text(s, wanted, values)
    while wanted.name in text:
        text = request_text(s, wanted, values)
    tools = None
    if s.chance(0.75):
        other = make_spec(s, avoid=frozenset({wanted.noun, "math"}))
        tools = declare(s, other, s.between(0, 1))
        if any(wanted.noun in tool["function"]["name"].lower() for tool in tools):
            tools = None
    thinking = s.chance(0.5)
    turn = assistant(NO_TOOL_TEXT, thought="No tool fits.", thinking=thinking)
    return Document(
        "tools", [*start(s), user(text), turn], tools, thinking, expect={"calls": [], "content": NO_TOOL_TEXT}
    )
