"""The scorer must accept right answers and reject near misses; every near miss here is one small step off."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.nano import scoring
from scripts.nano.corpus import MAKERS, make_document
from scripts.nano.dataset import load_tokenizer, render
from scripts.nano.lexicon import Sampler
from scripts.nano.rendering import render_text

END = "<|agens_end|>"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
            },
        },
    }
]
EXPECT = {"calls": [["get_weather", {"city": "Oslo", "days": 3, "wind": True}]]}
BODY = (
    "<|call|>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=wind>\ntrue\n</parameter>\n</function>\n<|/call|>"
)
THOUGHT = "Use get_weather with city Oslo.<|/think|>"


def tools(text: str, *, thinking: bool = True, expect: dict[str, Any] = EXPECT) -> scoring.Checks:
    return scoring.score_tools(text, thinking=thinking, tools=TOOLS, expect=expect)


def test_right_call_passes_every_check():
    assert all(tools(THOUGHT + BODY + END).values())
    assert all(tools(BODY + END, thinking=False).values())


@pytest.mark.parametrize(
    ("old", "new", "failing"),
    [
        ("Oslo\n", "Osla\n", {"values", "exact"}),
        ("Oslo\n", "oslo\n", {"values", "exact"}),
        ("Oslo\n", "Oslo \n", {"values", "exact"}),
        ("\n3\n", "\n4\n", {"values", "exact"}),
        ("\n3\n", "\nthree\n", {"values", "exact"}),
        ("\n3\n", "\n3.5\n", {"values", "exact"}),
        ("\n3\n", '\n"3"\n', {"values", "exact"}),
        ("\ntrue\n", "\nfalse\n", {"values", "exact"}),
        ("\ntrue\n", "\n1\n", {"values", "exact"}),
        ("function=get_weather", "function=getWeather", {"name", "exact"}),
        ("parameter=city", "parameter=town", {"params", "values", "exact"}),
        ("<parameter=wind>\ntrue\n</parameter>\n", "", {"params", "values", "exact"}),
        ("</function>\n", "</function>", {"well_formed", "name", "params", "values", "exact"}),
        ("<|/call|>", "", {"well_formed", "name", "params", "values", "exact"}),
        ("<|/call|>", "<|/call|> Done.", {"well_formed", "exact"}),
        ("<|call|>\n<function", "Sure.<|call|>\n<function", {"exact"}),
        ("<parameter=days>\n3\n", "<parameter=city>\n3\n", {"well_formed", "name", "params", "values", "exact"}),
    ],
)
def test_one_change_to_the_call_fails_exactly_these_checks(old: str, new: str, failing: set[str]):
    assert old in BODY
    for text, thinking in ((THOUGHT + BODY.replace(old, new, 1) + END, True), (BODY.replace(old, new, 1) + END, False)):
        checks = tools(text, thinking=thinking)
        assert {check for check, passed in checks.items() if not passed} == failing


def test_calls_too_few_too_many_or_unfinished():
    assert not any(v for k, v in tools(THOUGHT + BODY + BODY + END).items() if k != "well_formed")
    two = {"calls": EXPECT["calls"] * 2}
    assert all(tools(THOUGHT + BODY + BODY + END, expect=two).values())
    assert not tools(THOUGHT + BODY + END, expect=two)["exact"]
    assert not tools(THOUGHT + BODY)["well_formed"]  # no end token
    assert not tools(BODY + END)["well_formed"]  # the thought never closed
    assert not any(tools(THOUGHT + END).values())  # no call at all
    assert not any(tools(THOUGHT + "I have no tool for that." + END).values())
    assert not any(tools("").values())


def test_no_call_wanted():
    expect = {"calls": [], "content": "Hello!"}
    assert tools("Hi.<|/think|>Hello!" + END, expect=expect) == {"none": True}
    for wrong in (
        "Hi.<|/think|>Hello" + END,
        "Hi.<|/think|>Hello!" + BODY + END,
        "Hi.<|/think|>Hello!",
        "Hello!" + END,
    ):
        assert tools(wrong, expect=expect) == {"none": False}


def test_number_parameter_may_be_written_either_way_but_must_be_equal():
    declared = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}]
    form = "<|call|>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n<|/call|>" + END
    expect = {"calls": [["f", {"x": 12.5}]]}
    good = scoring.score_tools(form.format("12.50"), thinking=False, tools=declared, expect=expect)
    assert good["values"]
    for raw in ("12.4", "12,5", "12.5 EUR", "-12.5"):
        assert not scoring.score_tools(form.format(raw), thinking=False, tools=declared, expect=expect)["values"]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("63*7: ...<|/think|>The answer is 441." + END, True),
        ("wrong steps<|/think|>441" + END, True),
        ("63*7=441<|/think|>The answer is 351." + END, False),  # right thought, wrong answer
        ("441<|/think|>The answer is 4410." + END, False),
        ("441<|/think|>The answer is 44." + END, False),
        ("441<|/think|>The answer is -441." + END, False),
        ("441<|/think|>The answer is 441.5." + END, False),
        ("441<|/think|>The answer is 4,441." + END, False),
        ("441<|/think|>441 or 442" + END, False),
        ("441<|/think|>The answer is" + END, False),
        ("The answer is 441." + END, False),  # never left the thought
        ("x<|/think|>The answer is 441.", False),  # never stopped
        ("x<|/think|>The answer is 441." + BODY + END, False),
    ],
)
def test_arithmetic_counts_the_final_number_of_the_content(text: str, right: bool):
    assert scoring.score_arithmetic(text, thinking=True, expect={"result": 441})["exact"] is right


def test_arithmetic_without_thinking_reads_past_the_steps():
    text = "63*7: 3*7=21, 21+0=21 -> 1; 6*7=42, 42+2=44 -> 441\nThe answer is {}." + END
    assert scoring.score_arithmetic(text.format(441), thinking=False, expect={"result": 441})["exact"]
    assert not scoring.score_arithmetic(text.format(414), thinking=False, expect={"result": 441})["exact"]


@pytest.mark.parametrize(
    ("content", "valid", "exact"),
    [
        ('{"name": "Ola", "age": 3, "ok": true}', True, True),
        ('{"age": 3, "name": "Ola", "ok": true}', True, True),
        ('{"name": "Ola", "age": 3.0, "ok": true}', True, False),
        ('{"name": "Ola", "age": "3", "ok": true}', True, False),
        ('{"name": "Ola", "age": 3, "ok": 1}', True, False),
        ('{"name": "ola", "age": 3, "ok": true}', True, False),
        ('{"name": "Ola", "age": 3}', True, False),
        ('{"name": "Ola", "age": 3, "ok": true, "x": 1}', True, False),
        ('[{"name": "Ola", "age": 3, "ok": true}]', True, False),
        ('{"name": "Ola", "age": 3, "ok": true', False, False),
        ('{"name": "Ola", "age": 3, "ok": True}', False, False),
        ("{'name': 'Ola', 'age': 3, 'ok': true}", False, False),
        ('{"name": "Ola", "age": 3, "ok": true,}', False, False),
        ('{"name": "Ola", "name": "Ola", "age": 3, "ok": true}', False, False),
        ('{"name": "Ola", "age": NaN, "ok": true}', False, False),
        ('Here: {"name": "Ola", "age": 3, "ok": true}', False, False),
        ("", False, False),
    ],
)
def test_json(content: str, valid: bool, exact: bool):
    checks = scoring.score_json(
        f"Keys.<|/think|>{content}{END}", thinking=True, expect={"json": {"name": "Ola", "age": 3, "ok": True}}
    )
    assert checks == {"valid": valid, "exact": exact}


CODE = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("content", "compiles", "exact"),
    [
        (f"```python\n{CODE}\n```", True, True),
        (f"```python\n{CODE.replace('+', '-')}\n```", True, False),
        (f"```python\n{CODE.replace('add', 'sum')}\n```", True, False),
        (f"```python\n{CODE.replace('):', ')')}\n```", False, False),
        ("```python\ndef add(a, b):\nreturn a + b\n```", False, False),
        ("```python\na + b\n```", False, False),  # compiles, but is no function
        ("```python\n\n```", False, False),
        (f"```python\n{CODE}\nadd(1, 2)\n```", False, False),
        ("```python\ndef add(a, a):\n    return a\n```", False, False),  # parses, but does not compile
        (CODE, False, False),
        (f"```python\n{CODE}", False, False),
    ],
)
def test_python(content: str, compiles: bool, exact: bool):
    checks = scoring.score_python(content + END, thinking=False, expect={"code": CODE})
    assert checks == {"compiles": compiles, "exact": exact}


def test_content_must_match_letter_by_letter():
    expect = {"content": "kalo@mirat.io"}
    assert scoring.score_content("kalo@mirat.io" + END, thinking=False, expect=expect)["exact"]
    for wrong in ("kalo@mirat.i", "kalo@mirat.io.", " kalo@mirat.io", "Kalo@mirat.io", ""):
        assert not scoring.score_content(wrong + END, thinking=False, expect=expect)["exact"]
    assert not scoring.score_content("kalo@mirat.io", thinking=False, expect=expect)["exact"]
    assert not scoring.score_content("kalo@mirat.io" + END, thinking=True, expect=expect)["exact"]
    assert not scoring.score_content(f"kalo@mirat.io{END}\nmore", thinking=False, expect=expect)["exact"]


def test_agent_answer():
    expect = {"content": "The price for A: 12\nThe price for B: 7", "needs": ["12", "7"]}

    def agent(content: str) -> scoring.Checks:
        return scoring.score_agent(f"I have both results.<|/think|>{content}{END}", thinking=True, expect=expect)

    assert agent(expect["content"]) == {"exact": True, "uses_results": True}  # type: ignore[arg-type]
    assert agent("A costs 12, B costs 7") == {"exact": False, "uses_results": True}
    assert agent("The price for A: 12\nThe price for B: 8") == {"exact": False, "uses_results": False}
    assert agent("The price for A: 12") == {"exact": False, "uses_results": False}
    assert agent("The price for A: 12, for B: 7" + BODY) == {"exact": False, "uses_results": False}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_generated_answers_get_full_marks_and_damaged_ones_do_not(kind: str):
    tokenizer = load_tokenizer()
    sampler = Sampler(3, "heldout")
    for _ in range(60):
        document = make_document(sampler, kind)
        ids, _ = render(document, tokenizer)
        prompt = tokenizer.encode(render_text(document, prompt_only=True)).ids
        answer = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)

        def judge(text: str, document=document) -> scoring.Checks:
            return scoring.score(
                kind, text, thinking=document.enable_thinking, tools=document.tools, expect=document.expect
            )

        assert answer.endswith(END + "\n")
        assert all(judge(answer.rstrip("\n")).values()), answer
        assert not all(judge(answer.replace(END, "")).values()), answer
        closed = answer.rindex("<|/think|>") + len("<|/think|>") if document.enable_thinking else 0
        for damage in (answer[:closed] + "9" + answer[closed:], answer[: answer.index(END) - 1] + END):
            checks = judge(damage)
            # a leading 9 or a missing full stop does not change the last number of an arithmetic answer
            assert kind == "arithmetic" or not all(checks.values()), damage
