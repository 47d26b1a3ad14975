"""What the API's dialects share: JSON -> Job -> one stream of events -> the dialect's own words.

    body ─► prepare (dialect) ─► Job ─► EventStream ─► Reply (dialect) ─► one JSON answer, or frames as they come

A dialect is a function that reads its fields into a Job and a Reply that writes what the engine said.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiohttp import web

from agens_engine.core import StepEvent
from agens_engine.errors import RequestError
from agens_engine.server.answer import ChoiceAnswer
from agens_engine.server.auth import Handler
from agens_engine.server.errors import BodyTimeoutError, error_parts
from agens_engine.server.fields import Fields, parse_body
from agens_engine.server.generation import EventStream
from agens_engine.server.host import HOST, REQUEST_ID, LoadedModel
from agens_engine.server.job import Job
from agens_engine.server.sse import DONE, HEADERS, KEEP_ALIVE, frame
from agens_engine.server.usage import Usage, count_usage

log = logging.getLogger(__name__)
T = TypeVar("T")

_BODY_SECONDS = 120.0  # for a whole body; a client that sends a byte now and then must not hold a connection for ever
_SMALL_BYTES = 32_768  # half of what a connection buffers before a write waits
_WRITE_SECONDS = 60.0  # a reader that takes nothing for so long has left, whatever its connection says


class Reply(ABC):
    """Writes the answer to one job in one dialect: `whole` once at the end, or the frames of a stream.

    ends         the last event of each choice that has ended, by choice index
    keep_alive   sent while nothing else is
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ends: dict[int, StepEvent] = {}

    def note(self, index: int, event: StepEvent) -> None:
        if event.finish_reason is not None:
            self.ends[index] = event

    @abstractmethod
    def whole(self, answers: Sequence[ChoiceAnswer]) -> dict[str, Any]: ...

    @abstractmethod
    def event_frames(self, index: int, event: StepEvent) -> bytes: ...

    def first_frames(self) -> bytes:
        return b""

    def last_frames(self) -> bytes:
        return DONE

    def error_frames(self, error: BaseException) -> bytes:
        """The end of a stream that failed after it had begun."""
        return frame(error_parts(error)[1]) + DONE

    def usage(self) -> Usage:
        return count_usage(self.job.requests, self.ends, self.job.options.n)


async def read_request(request: web.Request, read: Callable[[Fields, LoadedModel], T]) -> T:
    """What `read` makes of the body; it runs on a thread, because rendering a long conversation takes a while."""
    model = request.app[HOST].require()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"the request body cannot be decoded: {error}", code="invalid_body") from None
    except TimeoutError:
        raise BodyTimeoutError(
            f"the request body did not arrive within {_BODY_SECONDS:g} seconds; send it again", code="body_timeout"
        ) from None

    def work() -> T:
        try:
            return read(Fields(parse_body(body)), model)
        except RecursionError:
            raise RequestError("the request's JSON is nested too deeply; flatten it", code="invalid_json") from None

    return await asyncio.to_thread(work)


def handler(prepare: Callable[[Fields, LoadedModel], Reply]) -> Handler:
    """The route of one dialect, whose `prepare` reads the body."""

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = await read_request(request, prepare)
        async with reply.job.model.generator.open(reply.job.requests) as stream:
            if reply.job.options.stream:
                return await _stream(request, stream, reply)
            return web.json_response(await _whole(stream, reply))

    return handle


async def _whole(stream: EventStream, reply: Reply) -> dict[str, Any]:
    answers = [ChoiceAnswer() for _ in reply.job.requests]
    async for item in stream.events():
        if item is not None:
            index, event = item
            answers[index].add(event)
            reply.note(index, event)
    return reply.whole(answers)


async def _stream(request: web.Request, stream: EventStream, reply: Reply) -> web.StreamResponse:
    """Write a whole stream. The generations are already accepted, so what fails from here on becomes an error event.

    While nothing comes (a long prefill), something goes out every keep_alive_seconds so that proxies keep the
    connection; writing it also notices a client that is gone.
    """
    response = web.StreamResponse(headers={**HEADERS, "x-request-id": request[REQUEST_ID]})
    try:
        await response.prepare(request)
        await response.write(reply.first_frames())
        await response.write(await _write_events(request, response, stream, reply))
        await response.write_eof()
    except ConnectionError:
        log.info("%s: the client went away during the stream", request[REQUEST_ID])
    return response


async def _write_events(request: web.Request, response: web.StreamResponse, stream: EventStream, reply: Reply) -> bytes:
    """Write frames as events come; returns the closing frames."""
    try:
        async for item in stream.events(reply.job.model.keep_alive_seconds):
            if item is None:
                frames = reply.keep_alive
            else:
                reply.note(*item)
                frames = reply.event_frames(*item)
            if frames:
                await _write(request, response, frames)
        return reply.last_frames()
    except ConnectionError:
        raise
    except Exception as error:
        return reply.error_frames(error)


async def _write(request: web.Request, response: web.StreamResponse, frames: bytes) -> None:
    """Raises ConnectionError for a client that is gone, or that has stopped reading."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() == 0 and len(frames) < _SMALL_BYTES:
        await response.write(frames)  # everything before was read, so this cannot block: no timer needed
        return
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await response.write(frames)
    except TimeoutError:
        raise ConnectionError(f"the client read nothing for {_WRITE_SECONDS:g} seconds") from None
