"""Greedy answers of the embedded model are token-identical with every set of draft sources and in every batch size.

Plain decoding, one request at a time, is the reference. The slow tests run the whole grid and 1,000 random prompts.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence

import pytest

from agens_engine.bench import load_suite
from agens_engine.commands.model import load_model, one_chat
from agens_engine.core import Request, SamplingParams, StepEvent
from agens_engine.engine import Engine
from agens_engine.server.host import LoadedModel, ModelHost
from agens_engine.settings import Settings
from agens_engine.speculate.build import SOURCE_NAMES

MAX_TOKENS = 48
SUBSETS = [frozenset(names) for n in range(len(SOURCE_NAMES) + 1) for names in itertools.combinations(SOURCE_NAMES, n)]
BATCHES = (1, 2, 4, 8, 16)
CHINESE = {"messages": [{"role": "user", "content": "请重复这句话：山高水长，后会有期。"}]}
# 13 prompts: two of every suite, and a language nano never saw
CASES = [case for name in ("chat", "code", "thinking", "tools", "agent", "json") for case in load_suite(name)[3:5]] + [
    CHINESE
]


@pytest.fixture(scope="module")
def nano() -> Iterator[LoadedModel]:
    settings = Settings.build({"model": "nano", "max_sequences": 16, "context_tokens": 1024})
    engine, text = load_model(settings)
    host = ModelHost(settings)
    host.attach(engine, text)
    yield host.require()
    engine.shutdown(0.0)
    assert isinstance(engine, Engine)
    engine.check()


def answers(nano: LoadedModel, requests: Sequence[Request], batch: int) -> list[list[int]]:
    """Token ids of each request's answer; `batch` requests are submitted at once, the next ones when these ended."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for start in range(0, len(requests), batch):
        group = requests[start : start + batch]
        left, done = set(r.request_id for r in group), threading.Event()

        def on_event(event: StepEvent, left: set[str] = left, done: threading.Event = done) -> None:
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                assert event.error is None, event.error
                left.discard(event.request_id)
                if not left:
                    done.set()

        for request in group:
            nano.engine.submit(request, on_event)
        assert done.wait(600)
    return list(tokens.values())


def chats(nano: LoadedModel, sources: frozenset[str]) -> list[Request]:
    options = {"temperature": 0, "max_tokens": MAX_TOKENS, "draft_sources": sorted(sources)}
    return [
        one_chat(nano, list(case["messages"]), {k: v for k, v in case.items() if k != "messages"} | options)
        for case in CASES
    ]


@pytest.fixture(scope="module")
def plain(nano: LoadedModel) -> list[list[int]]:
    found = answers(nano, chats(nano, frozenset()), 1)
    assert len(found) == 13 and sum(map(len, found)) > 200
    return found


def test_nano_brings_every_source(nano: LoadedModel):
    assert isinstance(nano.engine, Engine)
    assert {s.name for s in nano.engine.filler.sources} == set(SOURCE_NAMES)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sources", [SUBSETS[-1], frozenset({"mtp"}), frozenset({"dflash"})], ids=sorted)
def test_identity(nano: LoadedModel, plain: list[list[int]], sources: frozenset[str], batch: int):
    assert answers(nano, chats(nano, sources), batch) == plain


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sources", SUBSETS, ids=sorted)
def test_identity_whole_grid(nano: LoadedModel, plain: list[list[int]], sources: frozenset[str], batch: int):
    requests = chats(nano, sources)
    while len(requests) < batch:
        requests += chats(nano, sources)
    found = answers(nano, requests, batch)
    assert found == (plain * 2)[: len(found)]


@pytest.mark.slow
def test_identity_of_1000_random_prompts(nano: LoadedModel):
    """Random token ids, which no model is made for; 16 at once, with all sources, against 16 plain ones."""
    chance = random.Random(20)
    prompts = [
        [chance.randrange(nano.engine.vocab_size - 64) for _ in range(chance.randint(1, 80))] for _ in range(1000)
    ]

    def requests(speculation: bool) -> list[Request]:
        greedy = SamplingParams(temperature=0.0)
        return [Request(f"{speculation}-{i}", p, greedy, 24, speculation=speculation) for i, p in enumerate(prompts)]

    drafted, plain = answers(nano, requests(True), 16), answers(nano, requests(False), 16)
    different = [i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a != b]
    assert not different
