"""`agens bench`: suites, tallies and what is said about them; answers come from a script, not from a clock."""

from __future__ import annotations

import json
from collections.abc import Collection

import pytest

from agens_engine import bench
from agens_engine.bench import Answer, load_suite, run_suite, suite_names, table
from agens_engine.cli import main
from agens_engine.core import SourceCount, Timings
from agens_engine.errors import UsageError

CASES = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(3)]


class Scripted:
    """Answers of 12 tokens: plain in 12 steps of 0.1 s, with drafts in 4 steps of 0.15 s."""

    def __init__(self, wrong: Collection[str] = ()) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.wrong = wrong
        self.proposed = [5] * 7

    def ask(self, case, drafts: bool) -> Answer:
        text = case["messages"][0]["content"]
        self.calls.append((text, drafts))
        timings = Timings(decode_seconds=1.2, verify_steps=12, decoded_tokens=12)
        if drafts:
            timings = Timings(decode_seconds=0.6, verify_steps=4, decoded_tokens=12)
            timings.sources["copy"] = SourceCount(proposed=14, accepted=8, seconds=0.01)
            self.proposed = [n + 2 for n in self.proposed]
        tokens = (7,) if drafts and text in self.wrong else (1, 2, 3)
        return Answer(tokens, timings)

    def slots(self):
        return {"copy": {"proposed_by_slot": list(self.proposed), "accepted_by_slot": [1] * 7, "seconds": 0.0}}


def test_every_case_is_asked_both_ways_in_alternating_order():
    script = Scripted()
    result = run_suite(CASES, script.ask, script.slots, repeat=2)
    assert [text for text, _ in script.calls] == ["0", "0", "1", "1", "2", "2"] * 2
    assert [drafts for _, drafts in script.calls[:4]] == [True, False, False, True]
    said = result.as_dict()
    assert said["plain_tokens_per_second"] == pytest.approx(10.0)
    assert said["tokens_per_second"] == pytest.approx(20.0)
    assert said["ratio"] == pytest.approx(2.0)
    assert said["tokens_per_step"] == pytest.approx(3.0)
    assert said["identical"] is True and said["different_cases"] == []
    copy = said["sources"]["copy"]
    assert (copy["proposed"], copy["accepted"]) == (84, 48)
    assert copy["proposed_by_slot"] == [12] * 7 and copy["accepted_by_slot"] == [0] * 7  # only this suite's share


def test_a_different_answer_is_named():
    script = Scripted(wrong={"1"})
    result = run_suite(CASES, script.ask, script.slots, repeat=2)
    assert result.different == [1]
    assert result.as_dict()["identical"] is False
    assert any("NO" in line for line in table({"chat": result}))


def test_the_shipped_suites_can_be_read_and_fit_the_contract():
    assert {"chat", "code", "thinking", "tools", "agent", "copy"} <= set(suite_names())
    for name in suite_names():
        cases = load_suite(name)
        assert len(cases) >= 12
        assert all(case["messages"][-1]["role"] in ("user", "tool") for case in cases)


@pytest.mark.parametrize("text", ["[]", "{}", '{"cases": []}', '{"cases": [{}]}', "not json"])
def test_a_file_that_is_no_suite_is_refused(tmp_path, text):
    file = tmp_path / "mine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="not a suite"):
        load_suite(str(file))


def test_an_own_suite_file_and_an_unknown_name(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"cases": CASES}), encoding="utf-8")
    assert load_suite(str(file)) == CASES
    with pytest.raises(UsageError, match="known: agent, chat"):
        load_suite("nonsense")


def test_default_suites_exist():
    assert set(bench.DEFAULT_SUITES) <= set(suite_names())


def test_a_bench_of_nothing_is_refused_before_a_model_is_loaded(capsys):
    assert main(["bench", "--suite", " , "]) == 2
    assert "--suite names no suite" in capsys.readouterr().err
