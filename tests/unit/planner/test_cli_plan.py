"""`agens plan` from the outside: exit codes, one line per error, JSON on stdout, suggestions that hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agens_engine.commands.plan import expand_optional_values, main, run_plan
from agens_engine.errors import PlanError, UsageError
from agens_engine.planning import PlanRequest, build_question, make_plan, refusal_line
from agens_engine.probe import GpuMemory, Sources
from agens_planner import PlanRefused, plan, suggest
from agens_planner.units import GIB

CARD16 = ("--model", "volundr-32b", "--profile", "16gb")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["agens-plan", *arguments])
    return main()


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *CARD16, "--mtp", "--images", "on") == 0
    out = capsys.readouterr().out
    assert "context 262,144 of 262,144 tokens" in out
    assert "kv.dense" in out and "host.engram_tables" in out and "RTX 3090" in out


def test_json_with_less_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *CARD16, "--device-memory", "14GiB", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["fits"] and document["device"]["cap_bytes"] == 14 * GIB
    assert 65_536 < document["context_tokens"] < 262_144
    assert document["binding_line"] in {x["name"] for x in document["lines"]}


def test_refusal_is_one_line_and_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *CARD16, "--context", "262144", "--device-memory", "12GiB") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "binding line: weights.mlp.w2_82" in captured.err
    assert "cheapest: --set build=engine-2." in captured.err


def test_refusal_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *CARD16, "--context", "262144", "--device-memory", "12GiB", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["fits"]
    assert document["device"]["planned_peak_bytes"] > document["device"]["limit_bytes"]
    assert document["fit"][0]["flags"].startswith("--set build=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "16gbb"), "did you mean 16gb"),
        (("--device-memory", "14QiB"), "--device-memory: unknown unit"),
        (("--device-memory", "-1GiB"), "--device-memory must be between"),
        (("--sequences", "0"), "--sequences must be"),
        (("--context", "300000"), "at most|between 1 and the model's 262,144"),
        (("--context", "many"), "--context must be"),
        (("--set", "cap_bites=1"), "did you mean cap_bytes"),
        (("--set", "cap_bytes"), "KEY=VALUE"),
        (("--set", "build=int8"), "no build 'int8'"),
        (("--context", "max", "--sequences", "max"), "cannot both be max"),
        (("--explain", "kv.dens"), "did you mean kv.dense"),
        (("--svg", "/nowhere/at/all.svg"), "cannot be written"),
        (("--mtp", "/nowhere"), "is not a folder"),
        (("--model", "nano-32"), "no model 'nano-32'"),
        (("--frobnicate",), "No such option"),
    ],
)
def test_usage_errors_are_exit_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *CARD16, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert any(part in captured.err for part in message.split("|"))


def test_a_cap_below_the_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *CARD16, "--device-memory", "8GiB") == 1
    assert "binding line: weights.mlp" in capsys.readouterr().err


def test_optional_values() -> None:
    assert expand_optional_values(["--mtp", "--images", "on"]) == ["--mtp", "on", "--images", "on"]
    assert expand_optional_values(["--json", "--drafter"]) == ["--json", "--drafter", "on"]
    assert expand_optional_values(["--mtp", "some/dir"]) == ["--mtp", "some/dir"]
    assert expand_optional_values(["--mtp=off"]) == ["--mtp=off"]


def test_golden_folder_on_the_cpu(
    golden_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--model", str(golden_dir), "--profile", "cpu", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["context_tokens"] == 4096
    assert document["host"]["limit_bytes"] > 0  # a real folder is planned for the real machine


def test_svg_and_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.svg"
    assert run(monkeypatch, *CARD16, "--svg", str(target), "--explain", "state.kda") == 0
    assert target.read_text().startswith("<svg ")
    assert "169,869,312" in capsys.readouterr().out


def machine(free: float, total: float = 24.0) -> Sources:
    gpu = GpuMemory("card", int(total * GIB), int(free * GIB))
    return Sources(
        gpu=lambda: gpu,
        available=lambda: 48 * GIB,
        memlock=lambda: None,
        read_text=lambda _: None,
        sleep=lambda _: None,
    )


def test_profile_auto_follows_the_device() -> None:
    request = PlanRequest(model="volundr-32b", probe=True)
    question = build_question(request, environ={}, sources=machine(23.5))
    assert question.profile.name == "24gb"
    assert build_question(request, environ={}, sources=machine(15.5, 16)).profile.name == "16gb"
    none = replace(machine(1), gpu=lambda: None)
    assert build_question(request, environ={}, sources=none).profile.name == "16gb"  # a card is planned for a card


def test_environment_below_flags() -> None:
    environ = {"AGENS_PLAN_CAP_BYTES": "13GiB", "AGENS_PLAN_SEQUENCES": "2"}
    request = PlanRequest(model="volundr-32b", profile="16gb", sequences="3")
    profile = build_question(request, environ=environ, sources=machine(20)).profile
    assert (profile.cap_bytes, profile.sequences) == (13 * GIB, 3)


def test_make_plan_maps_errors() -> None:
    crowded = PlanRequest(model="volundr-32b", profile="16gb", probe=True)
    with pytest.raises(PlanError, match="cheapest: close other programs"):
        make_plan(build_question(crowded, environ={}, sources=machine(6.0, 16)))
    text_only = build_question(PlanRequest(model="volundr-32b", profile="16gb"), environ={})
    broken = replace(
        text_only, shapes=replace(text_only.shapes, mtp=None), options=replace(text_only.options, mtp=True)
    )
    with pytest.raises(UsageError, match="no MTP head"):
        make_plan(broken)


@pytest.mark.parametrize(
    "arguments",
    [
        {"context": "262144", "device_memory": "12GiB"},
        {"context": "262144", "device_memory": "14GiB", "images": "on", "mtp": "on"},
        {"context": "131072", "sequences": "8"},
        {"host_memory": "9GiB"},
        {"context": "262144", "device_memory": "14GiB", "settings": ("fp8_far=off", "fp8_dense=off")},
    ],
)
def test_every_suggestion_holds(arguments: dict[str, object]) -> None:
    """Typing a suggestion's flags makes the plan fit, at the context it promised."""
    request = PlanRequest(model="volundr-32b", profile="16gb", **arguments)  # type: ignore[arg-type]
    question = build_question(request, environ={})
    with pytest.raises(PlanRefused) as refused:
        plan(question.shapes, question.profile, question.device, question.host, question.options)
    suggestions = suggest(question, refused.value)
    assert suggestions
    assert suggestions[0].flags in refusal_line(refused.value, suggestions)
    for s in suggestions:
        changed = request
        words = s.flags.split()
        for flag, value in zip(words[::2], words[1::2], strict=True):
            if flag == "--set":
                changed = replace(changed, settings=(*changed.settings, value))
            else:
                changed = replace(changed, **{flag.removeprefix("--").replace("-", "_"): value})  # type: ignore[arg-type]
        again = build_question(changed, environ={})
        found = plan(again.shapes, again.profile, again.device, again.host, again.options)
        assert found.context_tokens == s.context_tokens
        assert found.sequences == s.sequences


def test_fit_lists_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    request = PlanRequest(model="volundr-32b", profile="16gb", context="262144", device_memory="14GiB")
    with pytest.raises(PlanError):
        run_plan(request, as_json=False, explain=None, fit=True, svg=None)
    out = capsys.readouterr().out
    assert "What would make it fit" in out
    assert "does not fit" in out
    assert "--context" in out
