"""`agens generate`: one prompt, the text on stdout, or everything about it as JSON (design section 7)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agens_engine.commands.model import one_chat, opened, run_request
from agens_engine.core import Request
from agens_engine.errors import RequestError, UsageError
from agens_engine.server.answer import ChoiceAnswer, finish_reason
from agens_engine.server.fields import Fields
from agens_engine.server.host import LoadedModel
from agens_engine.server.openai_completions import prepare_completion
from agens_engine.server.usage import timings_json
from agens_engine.settings import Settings
from agens_engine.text.output import ContentDelta, OutputParser

_CHAT_ONLY = ("reasoning_effort", "enable_thinking")


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from its flag or its file; raises UsageError unless exactly one is given."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE (- for stdin)")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        return sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read --prompt-file {prompt_file}: {reason}") from None


def run_generate(
    settings: Settings, prompt: str, *, system: str | None, raw: bool, json_out: bool, options: dict[str, Any]
) -> None:
    """options: fields of the HTTP API; raises UsageError for flags that do not go together."""
    if raw and (system is not None or any(name in options for name in _CHAT_ONLY)):
        raise UsageError("--raw continues the text as it is; --system, --thinking and --reasoning-effort need a chat")
    with opened(settings) as model:
        try:
            request = _request(model, prompt, system, raw, {**options, "speculation": settings.speculation})
        except RequestError as error:  # here the request is the command line
            raise UsageError(str(error)) from error
        answer = ChoiceAnswer()
        for event in run_request(model.engine, request):
            answer.add(event)
            if not json_out:
                _write("".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta)))
        if json_out:
            print(json.dumps(_result(request, answer), ensure_ascii=False))
        else:
            _write_end(answer)


def _request(model: LoadedModel, prompt: str, system: str | None, raw: bool, options: dict[str, Any]) -> Request:
    if raw:
        return prepare_completion(Fields({"prompt": prompt, **options}), model).job.requests[0]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return one_chat(model, [*messages, {"role": "user", "content": prompt}], options)


def _result(request: Request, answer: ChoiceAnswer) -> dict[str, Any]:
    last, said, watch = answer.last, answer.collect(), request.watch
    assert last is not None and isinstance(watch, OutputParser)
    return {
        "text": said.content or "",
        "reasoning": said.reasoning or "",
        "tool_calls": said.tool_calls,
        "token_ids": answer.token_ids,
        "finish_reason": finish_reason(last, watch),
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "cached_tokens": last.cached_tokens,
        },
        "timings": timings_json([last]),
    }


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _write_end(answer: ChoiceAnswer) -> None:
    """A line break where the text has none, and a word on stderr when there was no text to show."""
    said = answer.collect()
    if said.content and not said.content.endswith("\n"):
        _write("\n")
    if not said.content and said.reasoning:
        print("agens: the answer ended inside the thinking; raise --max-tokens or use --no-thinking", file=sys.stderr)
