"""The `agens` command: contract of flags, outputs and exit codes, over the scripted engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agens_engine.cli import main
from agens_engine.commands import model as model_command
from agens_engine.settings import Settings
from tests.fake_engine import FakeEngine, Script
from tests.serverkit import END, model_text, says
from tests.tinymodel import write_tiny_model

CALL = "<|call|>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n<|/call|>"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Commands get a FakeEngine instead of a model; the fixture lists those that were made."""
    for name in ("AGENS_MODEL", "AGENS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return []


def use(monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], script: Script) -> None:
    def load(settings: Settings) -> tuple[FakeEngine, Any]:
        engines.append(FakeEngine(script, max_sequences=settings.max_sequences or 8))
        return engines[-1], model_text()

    monkeypatch.setattr(model_command, "load_model", load)


def test_generate_prints_the_text_only(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, engines, says(f"let me see<|/think|>It is 4 🦊.{END}", 3))
    assert main(["generate", "--prompt", "2+2?", "--seed", "3", "--temperature", "0.5", "--max-tokens", "99"]) == 0
    assert capsys.readouterr().out == "It is 4 🦊.\n"
    request = engines[0].requests[0]
    assert (request.sampling.seed, request.sampling.temperature, request.max_tokens) == (3, 0.5, 99)
    assert request.speculation is True


def test_generate_json_has_the_promised_form(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, engines, says(f"hm<|/think|>Yes.{CALL}{END}", 2))
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--no-speculation", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    request = engines[0].requests[0]
    assert out["text"] == "Yes." + CALL.replace("<|call|>", "").replace("<|/call|>", "") and out["reasoning"] == "hm"
    assert out["finish_reason"] == "stop" and out["tool_calls"] == []
    assert out["token_ids"][-1] == model_text().tokenizer.id_of(END)
    assert out["usage"] == {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(out["token_ids"]),
        "cached_tokens": 3,
    }
    assert {"prefill_seconds", "decode_seconds", "verify_steps", "tokens_per_step", "sources"} <= set(out["timings"])
    assert out["timings"]["sources"]["copy"]["proposed"] == 4
    assert request.speculation is False


def test_generate_raw_continues_the_text(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, engines, says(f" upon a time{END}"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Once<|think|>"))
    assert main(["generate", "--prompt-file", "-", "--raw", "--stop", "time"]) == 0
    assert capsys.readouterr().out == " upon a \n"
    kit = model_text().tokenizer
    assert list(engines[0].requests[0].prompt_ids) == kit.encode("Once<|think|>", allow_control=True)


def test_generate_says_when_only_thinking_came(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, engines, says("and so on and on"))
    assert main(["generate", "--prompt", "x", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "--max-tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate"], 2, "give either --prompt TEXT or --prompt-file FILE"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], 2, "give either"),
        (["generate", "--prompt-file", "/nowhere/x"], 2, "cannot read --prompt-file"),
        (["generate", "--prompt", "a", "--raw", "--system", "s"], 2, "--raw continues"),
        (["generate", "--prompt", "a", "--temperature", "hot"], 2, "--temperature"),
        (["generate", "--prompt", "a", "--temperature", "nan"], 2, "temperature must be a finite number"),
        (["generate", "--prompt", "a", "--model", "no such model"], 2, "there is no model 'no such model'"),
        (["generate", "--prompt", "a", "--model", "volundr-32b"], 2, "shape card"),
        (["generate", "--prompt", "a", "--model", "owner/name-not-here"], 2, "agens pull owner/name-not-here"),
        (["generate", "--prompt", "a", "--profile", "no-such"], 2, "unknown profile 'no-such'"),
        (["serve", "--port", "99999"], 2, "--port must be between 0 and 65535"),
        (["serve", "--bogus"], 2, "--bogus"),
        (["serve", "--tp", "2", "--images", "on"], 2, "--images, --tp: not in this version yet"),
        (["chat", "--tp", "2"], 2, "--tp: not in this version yet"),
        (["bogus"], 2, "bogus"),
        (["logits", "--model", "nano"], 2, "--ids"),
        (["pull", "not a hub id"], 2, "is not a hub id"),
    ],
)
def test_errors_are_one_line_with_the_right_code(
    arguments: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    engines: list[FakeEngine],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "nan" in arguments:
        use(monkeypatch, engines, says(END))
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agens: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_pull_says_that_it_is_offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["pull", "owner/name"]) == 1
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a", "--model", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err


def test_J17_missing_tokenizer_fails_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_tiny_model(tmp_path) / "tokenizer.json").unlink()
    assert main(["generate", "--prompt", "a", "--model", str(tmp_path)]) == 1
    assert "no tokenizer.json" in capsys.readouterr().err


def test_doctor_reports_and_fails_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--model", str(write_tiny_model(tmp_path))]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["packages"]["torch"] and report["memory"]["total_bytes"] > 0
    assert report["model"]["weight_bytes"] > 1_000_000
    assert main(["doctor", "--model", str(tmp_path / "gone")]) == 1
    captured = capsys.readouterr()
    assert "not found" in captured.out and "there is no model" in captured.err


def test_chat_keeps_the_conversation_and_knows_its_commands(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, engines, says(f"t<|/think|>fine{END}"))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/what\nand again\n/reset\nanew\n/exit\nnever\n"))
    assert main(["chat", "--system", "be brief"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "fine\nfine\nfine\n" and "unknown command /what" in captured.err
    prompts = [model_text().tokenizer.decode(r.prompt_ids, skip_special=False) for r in engines[0].requests]
    assert len(prompts) == 3 and all("be brief" in prompt for prompt in prompts)
    assert "<|think|>t<|/think|>fine<|agens_end|>" in prompts[1] and "and again" in prompts[1]
    assert "hello" not in prompts[2] and "anew" in prompts[2]


def test_chat_survives_a_refused_request(
    monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, engines, says(f"t<|/think|>fine{END}"))
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 5000 + "\nshort\n"))
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "fine\n" and "the context holds 4096" in captured.err


def test_help_is_quick_and_imports_no_heavy_room() -> None:
    program = (
        "import sys; from agens_engine.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'aiohttp', 'tokenizers', 'jinja2', 'huggingface_hub'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    for command in ("serve", "chat", "generate", "plan", "logits", "doctor", "pull", "quantize", "evaluate", "bench"):
        assert f"\n  {command} " in done.stdout


def test_serve_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    logs: list[tuple[str, str]] = []
    monkeypatch.setattr("agens_engine.server.app.serve", lambda settings, load: seen.append(settings))
    monkeypatch.setattr("agens_engine.cli.log_to_stderr", lambda level, log_format: logs.append((level, log_format)))
    flags = "--cors-origin http://a:1 --cors-origin https://b --request-timeout 5 --drain 1.5 --log-format json"
    assert main(["serve", *flags.split(), "--reasoning-budget", "64", "--no-repetition-guard"]) == 0
    (settings,) = seen
    assert settings.cors_origins == {"http://a:1", "https://b"} and settings.request_timeout_seconds == 5
    assert settings.drain_seconds == 1.5 and settings.reasoning_budget == 64 and not settings.repetition_guard
    assert logs == [("info", "json")] and settings.host == "127.0.0.1"
