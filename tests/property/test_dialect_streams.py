"""Responses and Messages over every cut of an answer into steps: the stream says what the whole answer says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agens_engine.core import FinishReason, StepEvent
from agens_engine.server.answer import ChoiceAnswer
from agens_engine.server.anthropic_messages import MessagesReply, prepare_message
from agens_engine.server.dialect import Reply
from agens_engine.server.fields import Fields
from agens_engine.server.generation import EngineLike
from agens_engine.server.host import LoadedModel, ModelHost
from agens_engine.server.job import Job
from agens_engine.server.openai_responses import ResponsesReply, prepare_response
from agens_engine.server.responses_request import ResponsesRequest, translate_response
from agens_engine.settings import Settings
from agens_engine.text.output import OutputOptions, OutputParser
from tests.dialectkit import joined_message, joined_response, parse_events
from tests.serverkit import model_text
from tests.textkit import load_kit, mixed_tokens

SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}, "note": {"type": "string"}}}
PARAMETERS = '<parameter=page>\n1\n</parameter>\n<parameter=note>\na "b"\n</parameter>\n'
CALL = f"<|call|>\n<function=read>\n{PARAMETERS}</function>\n<|/call|>"


@dataclass(frozen=True)
class Sample:
    said: str
    reason: FinishReason = FinishReason.STOP
    stop: tuple[str, ...] = ()


SAMPLES = [
    Sample(f"hm 🦊<|/think|>I look.\n{CALL}\n{CALL}"),
    Sample(f"I need it.\n{CALL}"),
    Sample("only thought", FinishReason.LENGTH),
    Sample("hm<|/think|>" + CALL[:-30], FinishReason.LENGTH),
    Sample("hm<|/think|>The quick brown fox", stop=("own fox",)),
    Sample(f"<|/think|>{CALL}and after it"),
    Sample(""),
]


class NoEngine:
    model_name = "alias"
    context_tokens = 4096
    vocab_size = 1000
    max_sequences = 1

    def submit(self, request: Any, on_event: Any) -> None:
        raise AssertionError("nothing is generated here")

    def abort(self, request_id: str) -> None: ...

    def shutdown(self, drain_seconds: float) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


@cache
def loaded() -> LoadedModel:
    host = ModelHost(Settings())
    engine: EngineLike = NoEngine()
    host.attach(engine, model_text())
    return host.require()


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
READING = OutputOptions(tools=(TOOL,), starts_in_reasoning=True)


@cache
def prepared_response(stop: tuple[str, ...]) -> tuple[Job, ResponsesRequest]:
    body = {"input": "x", "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}], "stop": list(stop)}
    return prepare_response(Fields(body), loaded()).job, translate_response(Fields(body))


@cache
def prepared_message(stop: tuple[str, ...]) -> Job:
    body = {"messages": [{"role": "user", "content": "x"}], "stop_sequences": list(stop)}
    return prepare_message(Fields(body), loaded()).job


def unread(job: Job, sample: Sample) -> Job:
    """The job with a reader that has read nothing; much quicker than to prepare it anew."""
    watch = OutputParser(load_kit()[0], replace(READING, stops=sample.stop))
    return replace(job, requests=(replace(job.requests[0], watch=watch),))


def response_reply(sample: Sample) -> Reply:
    job, asked = prepared_response(sample.stop)
    return ResponsesReply(unread(job, sample), asked, {})


def message_reply(sample: Sample) -> Reply:
    return MessagesReply(unread(prepared_message(sample.stop), sample))


def step_events(reply: Reply, sample: Sample, cuts: Sequence[int]) -> list[StepEvent]:
    """The events of an engine that commits the answer in steps that end at the cuts."""
    ids = mixed_tokens(load_kit()[0], sample.said)
    watch = reply.job.watch(0)
    events, ended, at = [], False, 0
    for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        event = StepEvent(reply.job.requests[0].request_id)
        while at < end and not ended:
            deltas, ended = watch.push(ids[at])
            event.deltas += deltas
            event.token_ids.append(ids[at])
            at += 1
        events.append(event)
        if ended:
            break
    events[-1].finish_reason = sample.reason
    events[-1].deltas += watch.finish(sample.reason)
    events[-1].prompt_tokens, events[-1].completion_tokens = 5, at
    return events


def streamed(reply: Reply, sample: Sample, cuts: Sequence[int]) -> list[dict[str, Any]]:
    raw = reply.first_frames()
    for event in step_events(reply, sample, cuts):
        reply.note(0, event)
        raw += reply.event_frames(0, event)
    return parse_events(raw + reply.last_frames())


def whole(reply: Reply, sample: Sample) -> dict[str, Any]:
    answer = ChoiceAnswer()
    for event in step_events(reply, sample, ()):
        answer.add(event)
        reply.note(0, event)
    return reply.whole([answer])


def without_ids(value: Any) -> Any:
    """Ids, times and timings differ between two answers of the same text."""
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at", "timings")
        return {key: without_ids(entry) for key, entry in value.items() if key not in left_out}
    return value


DIALECTS: list[tuple[Callable[[Sample], Reply], Callable[[list[dict[str, Any]]], dict[str, Any]]]] = [
    (response_reply, joined_response),
    (message_reply, joined_message),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
@pytest.mark.parametrize(("make", "join"), DIALECTS, ids=["responses", "messages"])
def test_A1_A2_every_single_cut_streams_the_whole_answer(make: Any, join: Any, sample: Sample) -> None:
    expected = without_ids(whole(make(sample), sample))
    for cut in range(len(mixed_tokens(load_kit()[0], sample.said)) + 1):
        assert without_ids(join(streamed(make(sample), sample, [cut]))) == expected, cut


@given(st.sampled_from(SAMPLES), st.lists(st.integers(0, 250), max_size=40), st.sampled_from(DIALECTS))
def test_A1_A2_any_cuts_stream_the_whole_answer(sample: Sample, cuts: list[int], dialect: Any) -> None:
    make, join = dialect
    expected = without_ids(whole(make(sample), sample))
    assert without_ids(join(streamed(make(sample), sample, cuts))) == expected


def test_the_samples_say_what_they_are_for() -> None:
    kinds = [[item["type"] for item in whole(response_reply(sample), sample)["output"]] for sample in SAMPLES]
    assert kinds == [
        ["reasoning", "message", "function_call", "function_call"],
        ["reasoning", "function_call"],
        ["reasoning"],
        ["reasoning", "function_call"],
        ["reasoning", "message"],
        ["function_call", "message"],
        [],
    ]
    stops = [whole(message_reply(sample), sample)["stop_reason"] for sample in SAMPLES]
    assert stops == ["tool_use", "tool_use", "max_tokens", "max_tokens", "stop_sequence", "tool_use", "end_turn"]
