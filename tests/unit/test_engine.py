"""The loop with a real small model: results equal plain decoding, failures stay with their request, slots come back."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from agens_engine.core import DraftRun, FinishReason, Request, SamplingParams, StepEvent, StepResult
from agens_engine.engine import Engine
from agens_engine.errors import ContextLengthError, EngineStoppedError, RequestError
from agens_engine.model.volundr import Volundr
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault, Reads, SequenceView
from tests.modelkit import fresh_logits, random_model

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 96


@pytest.fixture(scope="module")
def model() -> Volundr:
    return random_model(max_position_embeddings=256)


class Inbox:
    """Collects the events of several requests and waits for their ends."""

    def __init__(self) -> None:
        self.events: dict[str, list[StepEvent]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, event: StepEvent) -> None:
        with self._changed:
            self.events[event.request_id].append(event)
            self._changed.notify_all()

    def wait(self, *ids: str, seconds: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(self.last(i) is not None for i in ids), seconds), self.events

    def wait_for_token(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.events[request_id]), 60.0)

    def last(self, request_id: str) -> StepEvent | None:
        events = self.events[request_id]
        return events[-1] if events and events[-1].finish_reason is not None else None

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def finish(self, request_id: str) -> FinishReason | None:
        last = self.last(request_id)
        return last.finish_reason if last else None


class Oracle:
    """A draft source that knows the future of one text and lies at the positions it is told to."""

    name = "oracle"
    reads = Reads()

    def __init__(self, future: Sequence[int], wrong: frozenset[int] = frozenset()) -> None:
        self.future, self.wrong = list(future), wrong
        self.results: list[StepResult] = []

    def begin(self, seq: SequenceView) -> None:
        """Nothing to prepare."""

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Nothing is shared."""

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        """The target is not read."""

    def propose(self, asks: Sequence[Ask]) -> list[DraftRun | DraftFault | None]:
        return [self._propose(ask.seq, ask.prefix, ask.num_slots) for ask in asks]

    def _propose(self, seq: SequenceView, prefix: tuple[int, ...], num_slots: int) -> DraftRun | None:
        done = len(seq.token_ids) - seq.prompt_len + len(prefix)
        tokens = [
            (token + 1) % VOCAB if done + i in self.wrong else token
            for i, token in enumerate(self.future[done : done + num_slots])
        ]
        return DraftRun(self.name, tuple(tokens)) if tokens else None

    def observe(self, seq: SequenceView, result: StepResult) -> None:
        self.results.append(result)

    def end(self, seq: SequenceView) -> None:
        """Nothing to free."""


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(model: Volundr, **options: Any) -> Engine:
        engine = Engine(model, **{"max_sequences": 4, "prefill_chunk_tokens": 16, **options})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.shutdown()
        engine.check()
        assert engine.pool.slots_free == engine.max_sequences


def prompt(seed: int, length: int = 30) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_greedy(model: Volundr, ids: list[int], count: int) -> list[int]:
    """Token by token from one-shot forwards: the definition."""
    out = list(ids)
    for _ in range(count):
        out.append(int(fresh_logits(model, out)[-1].argmax()))
    return out[len(ids) :]


def test_greedy_equals_one_shot_forwards(model: Volundr, engines: Any) -> None:
    engine, inbox = engines(model), Inbox()
    for i in range(6):
        engine.submit(Request(f"r{i}", prompt(i, 5 + 9 * i), GREEDY, max_tokens=8), inbox)
    inbox.wait(*(f"r{i}" for i in range(6)))
    for i in range(6):
        assert inbox.tokens(f"r{i}") == plain_greedy(model, prompt(i, 5 + 9 * i), 8), i
        assert inbox.finish(f"r{i}") is FinishReason.LENGTH


@pytest.mark.parametrize("wrong", [frozenset(), frozenset({0}), frozenset({3, 4, 17}), frozenset(range(40))])
def test_drafts_never_change_greedy_output(model: Volundr, engines: Any, wrong: frozenset[int]) -> None:
    """Every accepted length from 0 to 7 occurs; the text is that of plain decoding."""
    expected = plain_greedy(model, prompt(1), 40)
    oracle = Oracle(expected, wrong)
    engine, inbox = engines(model, sources=[oracle]), Inbox()
    engine.submit(Request("a", prompt(1), GREEDY, max_tokens=40), inbox)
    inbox.wait("a")
    assert inbox.tokens("a") == expected
    last = inbox.last("a")
    assert last is not None and last.timings is not None
    counts = last.timings.sources["oracle"]
    assert counts.accepted == sum(result.num_accepted for result in oracle.results)
    if not wrong:
        assert last.timings.tokens_per_step > 6
    assert 1 + last.timings.decoded_tokens == last.completion_tokens == 40


def test_seeded_sampling_is_the_same_with_and_without_drafts(model: Volundr, engines: Any) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, seed=11, frequency_penalty=0.3)
    texts = []
    for sources in ([], [ContextCopy()]):
        engine, inbox = engines(model, sources=sources), Inbox()
        for name in ("a", "b"):
            engine.submit(Request(name, prompt(2, 8) * 5, sampling, max_tokens=30), inbox)
        inbox.wait("a", "b")
        assert inbox.tokens("a") == inbox.tokens("b")
        texts.append(inbox.tokens("a"))
    assert texts[0] == texts[1]


def test_i3_unseeded_requests_differ(model: Volundr, engines: Any) -> None:
    engine, inbox = engines(model), Inbox()
    for name in ("a", "b"):
        engine.submit(Request(name, prompt(2), SamplingParams(temperature=5.0), max_tokens=20), inbox)
    inbox.wait("a", "b")
    assert inbox.tokens("a") != inbox.tokens("b")


def test_c10_a_stop_inside_an_accepted_block_ends_everything_there(model: Volundr, engines: Any) -> None:
    expected = plain_greedy(model, prompt(3), 12)
    stop = expected[5]
    end = expected.index(stop) + 1
    engine, inbox = engines(model, sources=[Oracle(expected)]), Inbox()
    engine.submit(Request("a", prompt(3), GREEDY, max_tokens=12, stop_token_ids=frozenset({stop})), inbox)
    inbox.wait("a")
    assert inbox.tokens("a") == expected[:end]
    last = inbox.last("a")
    assert last is not None and last.completion_tokens == end and last.finish_reason is FinishReason.STOP


class FailingWatch:
    """A receiver of text that breaks after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def push(self, token_id: int) -> tuple[list[Any], bool]:
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken watch")
        return [token_id], False

    def finish(self, reason: FinishReason) -> list[Any]:
        return ["end"]


def test_a_failing_request_leaves_its_neighbours_alone(model: Volundr, engines: Any) -> None:
    engine, inbox = engines(model), Inbox()
    engine.submit(Request("bad", prompt(1), GREEDY, max_tokens=20, watch=FailingWatch(3)), inbox)
    engine.submit(Request("good", prompt(2), GREEDY, max_tokens=20, watch=FailingWatch(100)), inbox)
    inbox.wait("bad", "good")
    last = inbox.last("bad")
    assert last is not None and last.finish_reason is FinishReason.ERROR and isinstance(last.error, ValueError)
    assert inbox.tokens("good") == plain_greedy(model, prompt(2), 20)
    deltas = [delta for event in inbox.events["good"] for delta in event.deltas]
    assert deltas == [*inbox.tokens("good"), "end"]


def test_a_forward_that_fails_for_one_sequence_spares_the_others(
    model: Volundr, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Volundr.forward

    def breaking(self: Volundr, batch: Any, taps: Sequence[int] = ()) -> Any:
        if 7 in batch.ids.tolist():
            raise RuntimeError("cannot run token 7")
        return forward(self, batch, taps)

    monkeypatch.setattr(Volundr, "forward", breaking)
    engine, inbox = engines(model), Inbox()
    good = [token for token in prompt(4) if token != 7]
    engine.submit(Request("bad", [7, 7, 7], GREEDY, max_tokens=5), inbox)
    engine.submit(Request("good", good, GREEDY, max_tokens=1), inbox)
    inbox.wait("bad", "good")
    assert inbox.finish("bad") is FinishReason.ERROR
    assert inbox.finish("good") is FinishReason.LENGTH
    assert engine.stats()["failed"] is None


def test_e1_e3_e4_abort_in_every_state(model: Volundr, engines: Any) -> None:
    """Queued, in prefill, in decode: the seat is free at the next step and the others go on."""
    engine, inbox = engines(model, max_sequences=2, prefill_chunk_tokens=1), Inbox()
    engine.submit(Request("decoding", prompt(1, 3), GREEDY, max_tokens=200), inbox)
    inbox.wait_for_token("decoding")
    engine.submit(Request("prefilling", prompt(2, 200), GREEDY, max_tokens=5), inbox)
    while engine.stats()["running"] < 2:
        time.sleep(0.001)
    engine.submit(Request("queued", prompt(3, 3), GREEDY, max_tokens=5), inbox)
    engine.abort("queued")
    engine.abort("prefilling")
    inbox.wait("queued", "prefilling")
    assert inbox.finish("queued") is inbox.finish("prefilling") is FinishReason.ABORT
    assert inbox.tokens("queued") == inbox.tokens("prefilling") == []
    assert inbox.last("decoding") is None
    engine.abort("decoding")
    engine.abort("decoding")
    engine.abort("never seen")
    inbox.wait("decoding")
    assert inbox.finish("decoding") is FinishReason.ABORT


def test_the_context_is_a_hard_limit(model: Volundr, engines: Any) -> None:
    engine, inbox = engines(model, context_tokens=40), Inbox()
    with pytest.raises(ContextLengthError, match="40 tokens and the context holds 40"):
        engine.submit(Request("long", prompt(1, 40), GREEDY, max_tokens=1), inbox)
    engine.submit(Request("fits", prompt(1, 39), GREEDY, max_tokens=50), inbox)
    inbox.wait("fits")
    assert len(inbox.tokens("fits")) == 1 and inbox.finish("fits") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("x", [], GREEDY, max_tokens=1), "empty"),
        (Request("x", [VOCAB], GREEDY, max_tokens=1), "0..95"),
        (Request("x", [-1], GREEDY, max_tokens=1), "0..95"),
        (Request("x", [1], GREEDY, max_tokens=0), "max_tokens"),
        (Request("x", [1], SamplingParams(logit_bias={VOCAB: 1.0}), max_tokens=1), "logit_bias"),
    ],
)
def test_bad_requests_are_refused_before_they_are_queued(
    model: Volundr, engines: Any, request_: Request, message: str
) -> None:
    engine = engines(model)
    with pytest.raises(RequestError, match=message):
        engine.submit(request_, Inbox())
    assert engine.stats()["waiting"] == 0


def test_unused_ids_are_never_generated(model: Volundr, engines: Any) -> None:
    engine, inbox = engines(model, unused_ids=range(5, VOCAB)), Inbox()
    engine.submit(Request("a", prompt(1), SamplingParams(temperature=3.0), max_tokens=30), inbox)
    inbox.wait("a")
    assert max(inbox.tokens("a")) < 5


def test_h3_logprobs_are_equal_with_and_without_drafts(model: Volundr, engines: Any) -> None:
    expected = plain_greedy(model, prompt(5), 16)
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    seen = []
    for sources in ([], [Oracle(expected, frozenset({2, 9}))]):
        engine, inbox = engines(model, sources=sources), Inbox()
        engine.submit(Request("a", prompt(5), sampling, max_tokens=16), inbox)
        inbox.wait("a")
        seen.append([entry for event in inbox.events["a"] for entry in event.logprobs])
    assert [entry.token_id for entry in seen[0]] == expected
    for one, two in zip(*seen, strict=True):
        assert one.token_id == two.token_id and abs(one.logprob - two.logprob) < 1e-4
        assert [token for token, _ in one.top] == [token for token, _ in two.top]


def test_shutdown_drains_then_refuses(model: Volundr) -> None:
    engine, inbox = Engine(model, max_sequences=2), Inbox()
    engine.submit(Request("a", prompt(1), GREEDY, max_tokens=20), inbox)
    engine.shutdown(drain_seconds=60.0)
    assert inbox.finish("a") is FinishReason.LENGTH
    with pytest.raises(EngineStoppedError):
        engine.submit(Request("b", prompt(1), GREEDY, max_tokens=1), inbox)


def test_shutdown_without_patience_aborts(model: Volundr) -> None:
    engine, inbox = Engine(model, max_sequences=1), Inbox()
    for name in ("a", "b"):
        engine.submit(Request(name, prompt(1), GREEDY, max_tokens=200), inbox)
    engine.shutdown(0.0)
    assert inbox.finish("a") is inbox.finish("b") is FinishReason.ABORT


def test_every_stream_gets_its_last_event_when_memory_cannot_be_freed(model: Volundr) -> None:
    engine, inbox = Engine(model, max_sequences=2, prefill_chunk_tokens=16), Inbox()

    def broken(slot: int) -> None:
        raise AssertionError("injected")

    engine.pool.release = broken  # type: ignore[method-assign]
    for name in ("x", "y"):
        engine.submit(Request(name, prompt(1), GREEDY, max_tokens=6), inbox)
    inbox.wait("x", "y", seconds=30.0)
    engine.shutdown(0.0)
    assert not engine._live
    with pytest.raises(EngineStoppedError):
        engine.submit(Request("z", prompt(1), GREEDY, max_tokens=2), inbox)
