"""Loads an engine with its text side for the command line, and runs one request on it in the calling thread."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agens_engine.core import FinishReason, Request, StepEvent
from agens_engine.errors import AgensError
from agens_engine.server.fields import Fields
from agens_engine.server.generation import EngineLike
from agens_engine.server.host import LoadedModel, ModelHost
from agens_engine.server.model_text import ModelText
from agens_engine.server.openai_chat import prepare_chat
from agens_engine.settings import Settings


def load_model(settings: Settings) -> tuple[EngineLike, ModelText]:
    """The text side first: it is quick, and a missing tokenizer should not cost a minute of loading weights."""
    text = ModelText.load(settings.model)
    from agens_engine.startup import load_engine

    return load_engine(settings, unused_ids=text.unused_ids()), text


@contextmanager
def opened(settings: Settings) -> Iterator[LoadedModel]:
    """A loaded model for the length of a command."""
    engine, text = load_model(settings)
    host = ModelHost(settings)
    host.attach(engine, text)
    try:
        yield host.require()
    finally:
        engine.shutdown(0.0)


def one_chat(model: LoadedModel, messages: list[dict[str, Any]], options: dict[str, Any]) -> Request:
    """The request for the next assistant turn; options are fields of the HTTP API, so both behave alike."""
    return prepare_chat(Fields({"messages": messages, **options}), model).job.requests[0]


def run_request(engine: EngineLike, request: Request) -> Iterator[StepEvent]:
    """Events until the last one. Leaving early (Ctrl-C, closed generator) aborts the request and waits for its end.

    raises   the request's own error when it failed
    """
    events: queue.SimpleQueue[StepEvent] = queue.SimpleQueue()
    engine.submit(request, events.put)
    ended = False
    try:
        while not ended:
            event = events.get()
            ended = event.finish_reason is not None
            if event.finish_reason is FinishReason.ERROR:
                if isinstance(event.error, AgensError):
                    raise event.error
                raise AgensError(f"the engine failed on this request: {event.error!r}") from event.error
            yield event
    finally:
        if not ended:
            engine.abort(request.request_id)
            while events.get().finish_reason is None:
                pass
