"""Routes, middlewares, and the server's lifetime: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web

from agens_engine.errors import UsageError
from agens_engine.server import model_routes, operations
from agens_engine.server.anthropic_messages import count_tokens, prepare_message
from agens_engine.server.auth import Handler, api_key_middleware
from agens_engine.server.cors import add_cors, preflight_middleware
from agens_engine.server.dialect import handler as dialect_handler
from agens_engine.server.errors import anthropic_parts, error_parts, error_response
from agens_engine.server.generation import EngineLike
from agens_engine.server.host import HOST, REQUEST_ID, HostState, ModelHost
from agens_engine.server.model_text import ModelText
from agens_engine.server.openai_chat import prepare_chat
from agens_engine.server.openai_completions import prepare_completion
from agens_engine.server.openai_responses import prepare_response
from agens_engine.server.web import page as web_page
from agens_engine.settings import Settings

log = logging.getLogger(__name__)

_ANTHROPIC_PATH = "/v1/messages"
_CLIENT_GONE = 499  # for log and metrics only: nobody is left to read a status
_POLLED_ROUTES = frozenset({"/health", "/metrics", "/slots", "/props"})
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# what handlers get, after the engine ended their generations, to write their last frames
_LAST_FRAMES_SECONDS = 5.0

LoadResult = tuple[EngineLike, ModelText]
LoadModel = Callable[[], LoadResult]


def make_app(host: ModelHost) -> web.Application:
    """The application over one model host; the host may still be loading."""
    settings = host.settings
    app = web.Application(
        client_max_size=settings.max_body_bytes,
        middlewares=[
            _errors_and_ids,
            preflight_middleware(settings.cors_origins),
            api_key_middleware(settings.api_key),
        ],
    )
    app[HOST] = host
    add_cors(app, settings.cors_origins)
    app.add_routes(
        [
            web.get("/", web_page),
            web.post("/v1/chat/completions", dialect_handler(prepare_chat)),
            web.post("/v1/completions", dialect_handler(prepare_completion)),
            web.post("/v1/responses", dialect_handler(prepare_response)),
            web.post("/v1/messages", dialect_handler(prepare_message)),
            web.post("/v1/messages/count_tokens", count_tokens),
            web.get("/v1/models", model_routes.list_models),
            web.get("/v1/models/{name:.+}", model_routes.get_model),
            web.post("/tokenize", model_routes.tokenize),
            web.post("/detokenize", model_routes.detokenize),
            web.post("/apply-template", model_routes.apply_template),
            web.get("/health", operations.health),
            web.get("/props", operations.props),
            web.get("/slots", operations.slots),
            web.get("/metrics", operations.metrics),
            web.get("/openapi.json", operations.openapi),
        ]
    )
    return app


@web.middleware
async def _errors_and_ids(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id (the client's own, if it is sane), turn whatever is raised into error JSON, count and log
    the outcome."""
    given = request.headers.get("x-request-id", "")
    request_id = given if _CLIENT_ID.fullmatch(given) else uuid.uuid4().hex
    request[REQUEST_ID] = request_id
    begun = time.perf_counter()
    problem = ""
    try:
        response = await handler(request)
        if not response.prepared:
            response.headers.setdefault("x-request-id", request_id)
    except asyncio.CancelledError:
        _note(request, _CLIENT_GONE, begun, "the client went away")
        raise
    except Exception as error:
        parts = anthropic_parts if request.path.startswith(_ANTHROPIC_PATH) else error_parts
        status, body = parts(error)
        problem = body["error"]["message"]
        response = error_response(error, status, body, request_id)
    _note(request, response.status, begun, problem)
    return response


def _note(request: web.Request, status: int, begun: float, problem: str) -> None:
    """One log line and one count for each request; polling routes are logged at debug level."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    request.app[HOST].metrics.count_request(route, status)
    seconds = time.perf_counter() - begun
    level = logging.DEBUG if route in _POLLED_ROUTES and status < 400 else logging.INFO
    fields = {
        "request_id": request[REQUEST_ID],
        "method": request.method,
        "route": route,
        "status": status,
        "seconds": round(seconds, 4),
    }
    log.log(
        level,
        "%s %s %s: %d in %.3f s%s",
        request[REQUEST_ID],
        request.method,
        request.rel_url.raw_path,  # still encoded: a path cannot forge a log line
        status,
        seconds,
        f", {' '.join(problem.split())}" if problem else "",
        extra=fields,
    )


def serve(settings: Settings, load: LoadModel) -> None:
    """Run until SIGINT or SIGTERM; blocks.

    load     builds the engine and the text side; called on a worker thread once the port is bound, so that a busy port
             is noticed before minutes of loading and /health can answer meanwhile
    raises   UsageError for an address that cannot be bound, and whatever `load` raises
    """
    asyncio.run(_serve(settings, load))


async def _serve(settings: Settings, load: LoadModel) -> None:
    host = ModelHost(settings)
    runner = web.AppRunner(
        make_app(host),
        # a handler whose client went away is cancelled, which aborts its generations
        handler_cancellation=True,
        shutdown_timeout=_LAST_FRAMES_SECONDS,
        access_log=log if settings.log_level == "debug" else None,
    )
    await runner.setup()
    stopping = asyncio.Event()
    _on_signals(host, stopping)
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose another --port"
            ) from error
        port = runner.addresses[0][1]
        _warn_if_public(settings)
        log.info("listening on http://%s:%d, loading %s", settings.host, port, settings.model)
        if await _load(host, load, stopping):
            log.info("ready: http://%s:%d/v1", settings.host, port)
            await stopping.wait()
        # the port stays open meanwhile: who comes now is told 503, and /health says why
        await _drain(host, settings.drain_seconds)
    finally:
        await runner.cleanup()


async def _load(host: ModelHost, load: LoadModel, stopping: asyncio.Event) -> bool:
    """Load on a thread of its own; False when a signal came first.

    A thread cannot be interrupted: it is a daemon, so that a stop during a long load ends the process at once.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LoadResult] = loop.create_future()

    def settle(result: LoadResult | BaseException) -> None:
        if loaded.done():
            return
        if isinstance(result, BaseException):
            loaded.set_exception(result)
        else:
            loaded.set_result(result)

    def work() -> None:
        result: LoadResult | BaseException
        try:
            result = load()
        except BaseException as error:
            result = error
        loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=work, name="load-model", daemon=True).start()
    stop = asyncio.create_task(stopping.wait())
    waiting: set[asyncio.Future[Any]] = {loaded, stop}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not loaded.done():
        loaded.cancel()
        return False
    host.attach(*loaded.result())
    return not stopping.is_set()


async def _drain(host: ModelHost, seconds: float) -> None:
    """Let running generations finish for a while, then end them; the engine's worker thread stops either way."""
    if host.model is None:
        return
    log.info("stopping; running generations have %.0f seconds to finish", seconds)
    await asyncio.to_thread(host.model.engine.shutdown, seconds)


def _on_signals(host: ModelHost, stopping: asyncio.Event) -> None:
    """First signal: finish what runs. Second signal: end it now."""

    def on_signal() -> None:
        if host.state is HostState.STOPPING and host.model is not None:
            log.warning("second signal: ending the running generations")
            host.model.generator.abort_all()
        host.stop()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _warn_if_public(settings: Settings) -> None:
    if settings.api_key is None and not _is_local(settings.host):
        log.warning(
            "listening on %s without an API key: anyone who can reach this address can use the model; "
            "set AGENS_API_KEY or --api-key, or use --host 127.0.0.1",
            settings.host,
        )


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
