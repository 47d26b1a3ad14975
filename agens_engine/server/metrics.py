"""Every number of /metrics, each named once: what the server counts itself, and what the engine says when asked.

    server   requests by route and status, tokens, waiting times, why generations ended: counted as they happen
    engine   sequences, drafts, memory by plan line, sessions: read from stats() on scrape

A name is only there once the engine reports its figure: no line is ever made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from agens_engine.core import StepEvent

# seconds; a queue may move within milliseconds or hold a request for minutes
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MEMORY_FIGURES = ("cap_bytes", "planned_bytes", "counted_peak_bytes", "measured_peak_bytes")
_LINE_FIGURES = ("planned_bytes", "used_bytes", "peak_bytes")

Stats = Mapping[str, Any]


class ServerMetrics:
    """Counters of one server, in a registry of their own (two servers in one process share nothing)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = self._counter("agens_requests", "HTTP requests answered", "route", "status")
        self._ended = self._counter("agens_generations", "generations that ended, by finish reason", "reason")
        self._prompt = self._counter("agens_prompt_tokens", "prompt tokens of ended generations")
        self._cached = self._counter("agens_cached_prompt_tokens", "prompt tokens that were not computed again")
        self._output = self._counter("agens_output_tokens", "tokens generated")
        self._queue = self._histogram("agens_queue_seconds", "from submission until the first prompt chunk may run")
        self._first = self._histogram("agens_time_to_first_token_seconds", "from submission until the first token")

    def observe_engine(self, stats: Callable[[], Stats]) -> None:
        """Add the engine's own figures to every scrape; called once, when the model is loaded."""
        self._registry.register(_EngineCollector(stats))

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def step(self, event: StepEvent) -> None:
        """Count what one step gave one generation."""
        self._output.inc(len(event.token_ids))
        if event.finish_reason is None:
            return
        self._ended.labels(event.finish_reason.value).inc()
        self._prompt.inc(event.prompt_tokens)
        self._cached.inc(event.cached_tokens)
        if event.timings is not None:
            self._queue.observe(event.timings.queue_seconds)

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(name, what, buckets=_SECONDS, registry=self._registry)


class _EngineCollector:
    """The engine's stats() as metric families, read at the moment of the scrape."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from _gauges(stats)
        yield from _draft_families(stats.get("drafts") or {})
        yield from _memory_families(stats.get("memory") or {})
        yield from _session_families(stats.get("sessions") or {})


def _gauges(stats: Stats) -> Iterator[Metric]:
    for name, key, what in (
        ("agens_sequences_running", "running", "sequences with a seat"),
        ("agens_sequences_waiting", "waiting", "sequences in the queue"),
        ("agens_slots_free", "slots_free", "seats that are free"),
    ):
        if _is_number(stats.get(key)):
            yield GaugeMetricFamily(name, what, value=stats[key])
    queue = stats.get("queue") or {}
    if _is_number(queue.get("oldest_seconds")):
        what = "how long the longest waiting sequence has waited so far"
        yield GaugeMetricFamily("agens_queue_oldest_seconds", what, value=queue["oldest_seconds"])
    for name, key, what in (
        ("agens_engine_steps", "steps", "forward passes"),
        ("agens_engine_failed_requests", "failed_requests", "requests that the engine gave up on"),
    ):
        if _is_number(stats.get(key)):
            yield CounterMetricFamily(name, what, value=stats[key])


def _draft_families(drafts: Stats) -> Iterator[Metric]:
    if _is_number(drafts.get("verify_steps")):
        yield CounterMetricFamily("agens_verify_steps", "verify steps of sequences", value=drafts["verify_steps"])
    if _is_number(drafts.get("tokens_per_step")):
        what = "tokens committed per verify step since the start"
        yield GaugeMetricFamily("agens_tokens_per_step", what, value=drafts["tokens_per_step"])
    sources = drafts.get("sources") or {}
    for key in ("proposed", "accepted"):
        family = CounterMetricFamily(f"agens_draft_tokens_{key}", f"draft tokens {key}", labels=["source"])
        for source, figures in sources.items():
            family.add_metric([source], figures[key])
        yield family


def _memory_families(memory: Stats) -> Iterator[Metric]:
    total = GaugeMetricFamily("agens_device_memory_bytes", "device memory of the plan", labels=["figure"])
    for key in _MEMORY_FIGURES:
        if _is_number(memory.get(key)):
            total.add_metric([key.removesuffix("_bytes")], memory[key])
    yield total
    what = "memory by plan line: planned, used now, and the most ever used"
    lines = GaugeMetricFamily("agens_plan_line_bytes", what, labels=["line", "place", "figure"])
    for name, use in (memory.get("lines") or {}).items():
        for key in _LINE_FIGURES:
            lines.add_metric([name, use["place"], key.removesuffix("_bytes")], use[key])
    yield lines


def _session_families(sessions: Stats) -> Iterator[Metric]:
    """Whatever the session cache counts, under the names it gives."""
    family = GaugeMetricFamily("agens_sessions", "figures of the session cache", labels=["figure"])
    for key, value in sorted(sessions.items()):
        if _is_number(value):
            family.add_metric([key], value)
    yield family


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
