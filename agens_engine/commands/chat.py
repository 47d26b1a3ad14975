"""`agens chat`: an interactive conversation in the terminal, streamed, thinking dimmed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from agens_engine.commands.model import one_chat, opened, run_request
from agens_engine.errors import AgensError, RequestError
from agens_engine.server.answer import ChoiceAnswer
from agens_engine.server.host import LoadedModel
from agens_engine.settings import Settings
from agens_engine.text.output import ContentDelta, ReasoningDelta

_DIM, _PLAIN = "\033[2m", "\033[0m"
_HELP = "/reset starts a new conversation, /exit leaves; Ctrl-C stops an answer."


def run_chat(settings: Settings, system: str | None, options: dict[str, Any]) -> None:
    """Read lines until /exit or the end of input. A request the model refuses is reported and the chat goes on."""
    _enable_line_editing()
    with opened(settings) as model:
        session = _Session(model, system, {**options, "speculation": settings.speculation})
        if sys.stdin.isatty():
            print(f"{model.name}, {model.engine.context_tokens} tokens of context. {_HELP}", file=sys.stderr)
        while (line := _read_line()) is not None:
            command = line.strip()
            if command in ("/exit", "/quit"):
                return
            if command == "/reset":
                session.reset()
                print("new conversation", file=sys.stderr)
            elif command.startswith("/") and " " not in command and "/" not in command[1:]:
                print(f"unknown command {command}. {_HELP}", file=sys.stderr)
            elif command:
                session.say(line)


class _Session:
    """The conversation so far; an answer joins it only when it is complete."""

    def __init__(self, model: LoadedModel, system: str | None, options: dict[str, Any]) -> None:
        self._model = model
        self._system = system
        self._options = options
        self._messages: list[dict[str, Any]] = []
        self._screen = _Screen()
        self.reset()

    def reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def say(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        answer = ChoiceAnswer()
        try:
            request = one_chat(self._model, asked, self._options)
            for event in run_request(self._model.engine, request):
                answer.add(event)
                for delta in event.deltas:
                    self._screen.show(delta)
        except KeyboardInterrupt:
            self._screen.end()
            print("(stopped; not kept in the conversation)", file=sys.stderr)
            return
        except RequestError as error:
            self._screen.end()
            print(f"agens: {error}", file=sys.stderr)
            return
        except AgensError:
            self._screen.end()
            raise
        self._screen.end()
        said = answer.collect()
        for call in said.tool_calls:
            print(f"[call] {json.dumps(call['function'], ensure_ascii=False)}")
        reply: dict[str, Any] = {"role": "assistant", "content": said.content or ""}
        if said.reasoning:
            reply["reasoning_content"] = said.reasoning
        if said.tool_calls:
            reply["tool_calls"] = said.tool_calls
        self._messages = [*asked, reply]


class _Screen:
    """Writes deltas; thinking is dim on a terminal and left out elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._dim = False
        self._at_line_start = True

    def show(self, delta: Any) -> None:
        if isinstance(delta, ReasoningDelta) and self._terminal:
            self._write(delta.text, dim=True)
        elif isinstance(delta, ContentDelta):
            self._write(delta.text, dim=False)

    def end(self) -> None:
        if self._dim:
            sys.stdout.write(_PLAIN)
            self._dim = False
        if not self._at_line_start:
            sys.stdout.write("\n")
            self._at_line_start = True
        sys.stdout.flush()

    def _write(self, text: str, *, dim: bool) -> None:
        if dim != self._dim and self._terminal:
            if not dim:
                self.end()
            else:
                sys.stdout.write(_DIM)
            self._dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n") if text else self._at_line_start


def _read_line() -> str | None:
    """The next line, None at the end of input; Ctrl-C at the prompt drops the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)


def _enable_line_editing() -> None:
    try:
        import readline
    except ImportError:  # some Python builds come without it; input() works all the same
        return
    readline.set_auto_history(True)
