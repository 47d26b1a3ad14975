"""Constrained output with drafts: every row's mask is the mask of decoding one token at a time, and a rejected draft
leaves no trace (case D3). Random grammars, random drafts, thoughts open and closed."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.core import Grammar, ReasoningControl
from agens_engine.sampling.rules.grammar import GrammarRule
from agens_engine.sampling.rules.row_rules import RowEffect
from agens_engine.text.call_grammar import CallPlan
from agens_engine.text.grammars import AnswerFormat, GrammarCompiler
from tests.textkit import load_kit

TOKENIZER = load_kit()[0]
COMPILER = GrammarCompiler(TOKENIZER)
VOCAB = TOKENIZER.vocab_size + 7  # the model has rows beyond the tokenizer
CONTROL = ReasoningControl(TOKENIZER.think_start_id, TOKENIZER.think_end_id, TOKENIZER.call_start_id)
PROMPTS = {"open": [5, CONTROL.think_start_id], "closed": [CONTROL.think_start_id, CONTROL.think_end_id]}
ENDS = TOKENIZER.end_token_ids

leaf = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["celsius", "fahrenheit", 3]},
        {"const": "Paris"},
    ]
)
names = st.sampled_from(["city", "unit", "page", "a b", 'q"'])


def _branches(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(lambda item: {"type": "array", "items": item}, inner)
    objects = st.builds(
        lambda properties, closed: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:1],
            "additionalProperties": not closed,
        },
        st.dictionaries(names, inner, max_size=3),
        st.booleans(),
    )
    return arrays | objects | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


schemas = st.recursive(leaf, _branches, max_leaves=5)
answers = st.one_of(
    schemas.map(lambda schema: AnswerFormat("json", schema, "p")),
    st.sampled_from([r"\d{2,4}-[a-z]+", "(the|a) (fox|dog)*!?", ".*"]).map(lambda r: AnswerFormat("regex", r, "p")),
    st.just(AnswerFormat("choice", ["beta", "beta gamma", "delta 🦊"], "p")),
    st.just(AnswerFormat("grammar", 'start: "(" start ")" | /[0-9]+/', "p")),
)
tools = st.builds(
    lambda name, properties: {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": sorted(properties)[:1]},
        },
    },
    st.sampled_from(["get_weather", "read_pdf"]),
    st.dictionaries(st.sampled_from(["city", "unit", "page"]), schemas, max_size=2),
)
plans = st.builds(
    lambda listed, required, parallel: CallPlan(tuple(listed), required, parallel),
    st.lists(tools, min_size=1, max_size=2, unique_by=lambda tool: tool["function"]["name"]),
    st.booleans(),
    st.booleans(),
)
forms = st.one_of(st.tuples(answers, st.none()), st.tuples(st.none(), plans), st.tuples(answers, plans))


def rule_for(grammar: Grammar, prompt: str) -> GrammarRule:
    return GrammarRule(grammar, VOCAB, PROMPTS[prompt], CONTROL)


def same(a: RowEffect | None, b: RowEffect | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.allow is None or b.allow is None:
        masks = a.allow is b.allow
    else:
        masks = torch.equal(a.allow, b.allow)
    return masks and (a.force, tuple(a.block), dict(a.bias)) == (b.force, tuple(b.block), dict(b.bias))


def allowed(effect: RowEffect | None) -> list[int]:
    assert effect is not None
    if effect.allow is not None:
        return [int(i) for i in effect.allow.nonzero()[:, 0]]
    return [i for i in range(TOKENIZER.vocab_size) if i not in effect.block]


def guess(draw: random.Random, effect: RowEffect | None) -> int:
    """Mostly a token that is possible; in a thought often the one that closes it."""
    if effect is not None and effect.allow is None and draw.random() < 0.4:
        return draw.choice([CONTROL.think_end_id, TOKENIZER.call_start_id])
    if effect is None or draw.random() < 0.1:
        return draw.randrange(TOKENIZER.vocab_size)
    options = allowed(effect)
    going_on = [i for i in options if i not in ENDS]
    return draw.choice(going_on or options)


@settings(max_examples=30, deadline=None)
@given(form=forms, prompt=st.sampled_from(sorted(PROMPTS)), seed=st.integers(0, 2**32))
def test_rows_equal_sequential_decoding_and_rejected_drafts_leave_no_trace(
    form: tuple[AnswerFormat | None, CallPlan | None], prompt: str, seed: int
) -> None:
    grammar = COMPILER.compile(*form)
    assert grammar is not None
    draw = random.Random(seed)
    drafted, plain = rule_for(grammar, prompt), rule_for(grammar, prompt)
    committed: list[int] = []
    for _ in range(6):
        # the reference: a rule of its own that decodes the drafts one by one
        walker = rule_for(grammar, prompt)
        walker.commit(committed)
        expected: list[RowEffect | None] = []
        drafts: list[int] = []
        for _ in range(draw.randrange(8)):
            [effect] = walker.effects(())
            expected.append(effect)
            drafts.append(guess(draw, effect))
            if drafts[-1] not in allowed(effect) or drafts[-1] in ENDS:
                break  # nothing after this row can be reached
            walker.commit(drafts[-1:])
        else:
            expected += walker.effects(())
        found = drafted.effects(tuple(drafts))
        assert len(found) == len(drafts) + 1
        assert all(same(a, b) for a, b in zip(found, expected, strict=False)), (committed, drafts)
        assert all(effect is None for effect in found[len(expected) :])

        num_accepted = draw.randrange(len(expected))
        [*kept, last] = [*drafts[:num_accepted], draw.choice(allowed(expected[num_accepted]))]
        for rule in (drafted, plain):
            rule.commit([*kept, last])
        committed += [*kept, last]
        assert same(drafted.effects(())[0], plain.effects(())[0])
        if last in ENDS:
            break


@settings(max_examples=20, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_end_tokens_are_allowed_exactly_when_the_answer_is_complete(schema: dict[str, Any], seed: int) -> None:
    """Whatever random walk through the mask is taken: an end token is possible only after text that is whole JSON, and
    ids without a token, or with a control token, never are."""
    grammar = COMPILER.compile(AnswerFormat("json", schema, "p"), None)
    assert grammar is not None
    rule = rule_for(grammar, "closed")
    draw = random.Random(seed)
    said: list[int] = []
    for _ in range(60):
        [effect] = rule.effects(())
        options = allowed(effect)
        assert options and max(options) < TOKENIZER.vocab_size
        assert not (set(options) & (TOKENIZER.control_ids - ENDS))
        ends = set(options) & ENDS
        if ends:
            assert ends == ENDS
            json.loads(TOKENIZER.decode(said))
        going_on = [i for i in options if i not in ENDS]
        if not going_on:
            return
        said.append(draw.choice(going_on))
        rule.commit(said[-1:])
