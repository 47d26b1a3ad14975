"""The engine with its drafters: the same text whatever drafts, at any batch; memory as planned; faults cost nothing."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from agens_engine.core import FinishReason, Request, SamplingParams
from agens_engine.engine import Engine
from agens_engine.errors import CheckpointError, ConfigError
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.volundr import Volundr
from agens_engine.planning import plan_run
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.sequence import LiveSequence
from agens_engine.server.usage import timings_json
from agens_engine.settings import Settings
from agens_engine.speculate.build import SOURCE_NAMES, build_sources
from agens_engine.speculate.drafting import MAX_DRAFTS
from agens_engine.speculate.source import Ask, CommittedRows
from agens_engine.startup import load_engine
from tests.drafterkit import dflash2_raw, mtp_raw, random_dflash2, random_mtp, stored, write_folder
from tests.e2e.test_plan_holds import peak_bytes
from tests.modelkit import random_model, write_checkpoint
from tests.unit.test_engine import VOCAB, Inbox, prompt

GREEDY = SamplingParams(temperature=0.0)
SUBSETS = [s for n in range(4) for s in itertools.combinations(SOURCE_NAMES, n)]


@pytest.fixture(scope="module")
def model() -> Volundr:
    return random_model()


@pytest.fixture
def engines(model: Volundr) -> Iterator[Any]:
    """Engines on the random model with random drafters; sources in slot order."""
    made: list[Engine] = []

    def make(
        names: Collection[str] = SOURCE_NAMES, *, head: Any = None, drafter: Any = None, ends: Any = None
    ) -> Engine:
        sources = build_sources(
            ends or TargetEnds.of(model),
            names=names,
            head=head or random_mtp(),
            drafter=drafter or random_dflash2(),
            max_sequences=4,
            context_tokens=200,
        )
        engine = Engine(model, max_sequences=4, prefill_chunk_tokens=16, context_tokens=200, sources=sources)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.shutdown()
        engine.check()
        for source in engine.filler.sources:
            if hasattr(source, "memory"):
                source.memory.check()
                assert not source.memory._slots


@cache
def expected(seed: int, count: int) -> tuple[int, ...]:
    """Plain greedy decoding, one token a step."""
    engine, inbox = Engine(random_model(), max_sequences=1, prefill_chunk_tokens=16, context_tokens=200), Inbox()
    engine.submit(Request("a", text(seed), GREEDY, max_tokens=count), inbox)
    inbox.wait("a")
    engine.shutdown()
    return tuple(inbox.tokens("a"))


def text(seed: int) -> list[int]:
    """Prompts of 9 to 41 tokens that repeat themselves, so that copies happen."""
    return (prompt(seed, 9 + 4 * seed) * 2)[: 12 + 9 * seed]


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_greedy_identity(engines: Any, names: tuple[str, ...], batch: int) -> None:
    engine, inbox = engines(names), Inbox()
    for i in range(batch):
        engine.submit(Request(f"r{i}", text(i), GREEDY, max_tokens=16), inbox)
    inbox.wait(*(f"r{i}" for i in range(batch)))
    for i in range(batch):
        assert tuple(inbox.tokens(f"r{i}")) == expected(i, 16), (names, i)
    drafts = engine.stats()["drafts"]
    assert not any(drafts["failures"].values())
    for name in set(names) - {"copy"}:
        assert drafts["sources"][name]["proposed"] > 0


def always(token: int, model: Volundr) -> TargetEnds:
    """Ends whose head scores one token far above the rest: every network draft is that token."""

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros((rows.shape[0], VOCAB)).index_fill_(1, torch.tensor([token]), 1e4)

    return replace(TargetEnds.of(model), head=head)


@pytest.mark.parametrize("names", [("mtp",), ("dflash",), ("mtp", "dflash"), ("copy", "mtp", "dflash")])
def test_h1_h2_accepted_drafts_under_bias_and_penalty_leave_the_text_as_it_is(
    model: Volundr, engines: Any, names: tuple[str, ...]
) -> None:
    """Drafts that always say 7, on requests that say 7 often: chains end accepted, refused and cut anywhere."""
    wishes = [
        SamplingParams(temperature=0.0, logit_bias={7: 30.0}),
        SamplingParams(temperature=0.0, logit_bias={7: 30.0, 9: 29.0, 11: 28.5}, frequency_penalty=0.7),
        SamplingParams(temperature=0.8, seed=5, logit_bias={7: 9.0}, presence_penalty=-1.0),
    ]
    seen = []
    for chosen in ((), names):
        engine, inbox = engines(chosen, ends=always(7, model)), Inbox()
        for i, sampling in enumerate(wishes):
            engine.submit(Request(f"r{i}", text(1), sampling, max_tokens=24), inbox)
        inbox.wait(*(f"r{i}" for i in range(3)))
        seen.append([inbox.tokens(f"r{i}") for i in range(3)])
        if chosen:
            counts = {name: engine.drafts.sources[name] for name in set(names) - {"copy"}}
            assert sum(c.accepted for c in counts.values()) > 10, counts
            assert sum(c.proposed - c.accepted for c in counts.values()) > 10, counts
    assert seen[0] == seen[1]
    assert len(set(seen[0][1])) > 1


@pytest.mark.parametrize("sources", [("copy", "mtp"), ("dflash",), SOURCE_NAMES])
def test_seeded_sampling_gives_the_plain_text_whatever_drafts(engines: Any, sources: tuple[str, ...]) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=20, seed=3)
    seen = []
    for names in ((), sources):
        engine, inbox = engines(names), Inbox()
        engine.submit(Request("a", text(2), sampling, max_tokens=20), inbox)
        inbox.wait("a")
        seen.append(inbox.tokens("a"))
    assert seen[0] == seen[1]


def test_seeded_sampling_with_all_sources_repeats_itself_and_is_blind_to_neighbours(engines: Any) -> None:
    sampling = SamplingParams(temperature=1.5, seed=3)
    seen = []
    for neighbours in (0, 2):
        engine, inbox = engines(), Inbox()
        for i in range(neighbours):
            engine.submit(Request(f"n{i}", text(i), SamplingParams(temperature=2.0), max_tokens=30), inbox)
        engine.submit(Request("a", text(2), sampling, max_tokens=16), inbox)
        inbox.wait("a", *(f"n{i}" for i in range(neighbours)))
        seen.append(inbox.tokens("a"))
        assert engine.drafts.sources["dflash"].proposed > 0
    assert seen[0] == seen[1]


def test_requests_choose_their_sources(engines: Any) -> None:
    engine, inbox = engines(), Inbox()
    wishes: dict[str, Any] = {
        "all": {},
        "none": {"speculation": False},
        "mtp": {"draft_sources": frozenset({"mtp"})},
        "dflash": {"draft_sources": frozenset({"dflash"})},
    }
    for name, wish in wishes.items():
        engine.submit(Request(name, text(1), GREEDY, max_tokens=16, **wish), inbox)
    inbox.wait(*wishes)
    drafted = {}
    for name in wishes:
        assert tuple(inbox.tokens(name)) == expected(1, 16), name
        last = inbox.last(name)
        assert last is not None and last.timings is not None
        drafted[name] = {source for source, count in last.timings.sources.items() if count.proposed}
    assert drafted["none"] == set() and drafted["mtp"] == {"mtp"} and drafted["dflash"] == {"dflash"}
    assert {"mtp", "dflash"} <= drafted["all"]
    slots = engine.drafts.summary()["sources"]["mtp"]["proposed_by_slot"]
    assert len(slots) == MAX_DRAFTS and slots[0] > 0 and slots[6] > 0  # alone it goes to the end


def test_nothing_of_the_target_is_handed_over_when_nothing_reads_it(engines: Any, model: Volundr) -> None:
    seen: list[tuple[int, ...]] = []
    original = model.forward

    def spy(batch: Any, taps: Any = ()) -> Any:
        seen.append(tuple(taps))
        return original(batch, taps)

    model.forward = spy  # type: ignore[method-assign]
    try:
        for names in (("copy",), ("copy", "mtp"), ("copy", "dflash")):
            engine, inbox = engines(names), Inbox()
            engine.submit(Request("a", text(1), GREEDY, max_tokens=4), inbox)
            inbox.wait("a")
            assert set(seen) == ({(0, 2, 3)} if "dflash" in names else {()})
            seen.clear()
            engine.submit(Request("b", text(1), GREEDY, max_tokens=4, speculation=False), inbox)
            inbox.wait("b")
            assert set(seen) == {()}
            seen.clear()
    finally:
        del model.forward


@pytest.mark.parametrize("broken", ["mtp", "dflash"])
def test_h16_a_drafter_full_of_nan_changes_nothing(engines: Any, broken: str, caplog: Any) -> None:
    head, drafter = random_mtp(), random_dflash2()
    for parameter in (head if broken == "mtp" else drafter).parameters():
        parameter.data.fill_(torch.nan)
    engine, inbox = engines(head=head, drafter=drafter), Inbox()
    with caplog.at_level(logging.WARNING, logger="agens_engine.speculate"):
        for sampling, name in ((GREEDY, "greedy"), (SamplingParams(temperature=1.0), "sampled")):
            engine.submit(Request(name, text(1), sampling, max_tokens=16), inbox)
        inbox.wait("greedy", "sampled")
    assert tuple(inbox.tokens("greedy")) == expected(1, 16)
    assert inbox.finish("sampled") is FinishReason.LENGTH
    failures = engine.stats()["drafts"]["failures"]
    assert failures[broken] > 5 and sum(failures.values()) == failures[broken]
    assert len(caplog.records) == 1 and "NaN" in caplog.text


def test_prefill_beside_decoding_feeds_both(engines: Any) -> None:
    """One request decodes with drafts while others are still prefilling in chunks; everyone gets the plain text."""
    engine, inbox = engines(), Inbox()
    engine.submit(Request("r0", text(0), GREEDY, max_tokens=16), inbox)
    inbox.wait_for_token("r0")
    for i in (1, 2, 3):
        engine.submit(Request(f"r{i}", text(i), GREEDY, max_tokens=16), inbox)
    inbox.wait("r0", "r1", "r2", "r3")
    for i in range(4):
        assert tuple(inbox.tokens(f"r{i}")) == expected(i, 16)


def test_c10_d4_rows_after_a_stop_are_not_handed_over(model: Volundr, engines: Any) -> None:
    stop = expected(1, 16)[4]
    engine, inbox = engines(), Inbox()
    engine.submit(Request("a", text(1), GREEDY, max_tokens=16, stop_token_ids=frozenset({stop})), inbox)
    inbox.wait("a")
    end = expected(1, 16).index(stop) + 1
    assert tuple(inbox.tokens("a")) == expected(1, 16)[:end]
    assert inbox.finish("a") is FinishReason.STOP


def test_the_end_of_a_request_is_logged_with_its_drafts(engines: Any, caplog: Any) -> None:
    engine, inbox = engines(), Inbox()
    with caplog.at_level(logging.INFO, logger="agens_engine.engine"):
        engine.submit(Request("a", text(1), GREEDY, max_tokens=16), inbox)
        inbox.wait("a")
    (line,) = [r.getMessage() for r in caplog.records if "request a ended" in r.getMessage()]
    assert "16 generated" in line and "mtp" in line and "dflash" in line
    last = inbox.last("a")
    assert last is not None and last.timings is not None
    out = timings_json([last])
    for name, count in last.timings.sources.items():
        assert out["sources"][name]["proposed"] == count.proposed
        assert out["sources"][name]["tokens_per_step"] == count.accepted / last.timings.verify_steps


# --- from folders ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A random model with both drafters in its subfolders."""
    made = write_checkpoint(tmp_path_factory.mktemp("model"))
    write_folder(made / "drafter", dflash2_raw(), stored(random_dflash2()))
    write_folder(made / "mtp", mtp_raw(), stored(random_mtp(), lambda name: "mtp." + name))
    return made


def settings(folder: Path, **flags: Any) -> Settings:
    base = {"model": str(folder), "context_tokens": 128, "max_sequences": 2, "prefill_chunk_tokens": 16}
    return Settings.build({**base, **flags}, environ={})


@pytest.mark.parametrize(("context", "sequences"), [(128, 2), (300, 1), (64, 3)])
def test_drafter_memory_is_what_the_plan_says(folder: Path, context: int, sequences: int) -> None:
    engine, inbox = load_engine(settings(folder, context_tokens=context, max_sequences=sequences)), Inbox()
    try:
        assert [s.name for s in engine.filler.sources] == ["copy", "mtp", "dflash"]
        assert engine.arena is not None
        for line in ("drafter.weights", "drafter.context", "host.codebooks", "mtp.weights", "mtp.context"):
            use = engine.arena.lines[line]
            assert use.used_bytes == use.planned_bytes > 0, (line, use)
        full = [3 + i % 90 for i in range(context - 20)]
        engine.submit(Request("a", full, GREEDY, max_tokens=50), inbox)
        inbox.wait("a", seconds=120)
        assert inbox.finish("a") is FinishReason.LENGTH and len(inbox.tokens("a")) == 20
        assert not any(engine.filler.num_failures.values())
    finally:
        engine.shutdown()
    engine.check()


def live(name: str) -> LiveSequence:
    sampling = SamplingParams(temperature=1.0)  # no seed: the walk samples, with a q of its own
    sampler = SequenceSampler(sampling, [5] * 64, UnusedTokens(VOCAB))
    request = Request(name, [5] * 64, sampling, max_tokens=9)
    return LiveSequence(request, sampler, lambda event: None, 9, [5] * 65, 64)


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("kind", ["mtp", "dflash", "plain dflash"])
def test_temporaries_of_drafting_fit_their_lines(
    folder: Path, model: Volundr, tmp_path: Path, kind: str, sequences: int
) -> None:
    features: dict[str, Any] = {"features": {}} if kind == "plain dflash" else {}
    block = random_dflash2(**features)
    other = write_folder(tmp_path, dflash2_raw(**features), stored(block))
    plan = plan_run(settings(folder, max_sequences=sequences, drafter=str(other)))
    room: dict[str, Any] = {"max_sequences": sequences, "context_tokens": plan.context_tokens}
    _, head, drafter = build_sources(TargetEnds.of(model), head=random_mtp(), drafter=block, **room)
    source, width, line = (head, 32, "mtp.scratch") if kind == "mtp" else (drafter, 96, "drafter.scratch")
    seqs, rows = [live(f"r{i}") for i in range(sequences)], torch.randn((64, width))

    def commit(num: int, first: int) -> None:
        ids, part = torch.full((num,), 5), rows[:num]
        hidden, taps = (part, None) if kind == "mtp" else (None, part)
        source.commit([CommittedRows(s, first, hidden, taps, ids) for s in seqs])

    def draft() -> None:
        asks = [Ask(s, (), 7) for s in seqs]
        source.prepare(asks)
        source.propose(asks)

    with torch.inference_mode():
        for s in seqs:
            source.begin(s)
        commit(64, 0)
        draft()
        assert peak_bytes(draft) <= plan.bytes_of(line)
        assert peak_bytes(lambda: commit(8, 64)) <= plan.bytes_of(line)
        for s in seqs:  # a prompt chunk comes when the forward's own work space is free again
            source.end(s)
        source.begin(seqs[0])
        del seqs[1:]
        assert peak_bytes(lambda: commit(16, 0)) <= plan.bytes_of(line) + plan.bytes_of("activations.prefill")


def test_switches_decide_what_is_planned_and_loaded(folder: Path, tmp_path: Path) -> None:
    def lines(**flags: Any) -> set[str]:
        plan = plan_run(settings(folder, **flags))
        return {line.name.partition(".")[0] for line in plan.lines} & {"mtp", "drafter"}

    assert lines() == lines(mtp="auto", drafter="auto") == {"mtp", "drafter"}
    assert lines(mtp="off") == lines(draft_sources="copy,dflash") == {"drafter"}
    assert lines(drafter="off") == {"mtp"}
    assert lines(speculation=False) == lines(draft_sources="copy") == set()
    moved = shutil.copytree(folder / "drafter", tmp_path / "elsewhere")
    engine = load_engine(settings(folder, mtp="off", drafter=str(moved)))
    engine.shutdown()
    assert [s.name for s in engine.filler.sources] == ["copy", "dflash"]


def test_an_mtp_head_among_the_model_s_own_tensors_is_found(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "model")
    head = stored(random_mtp(intermediate_size=48), lambda name: "mtp." + name)
    from safetensors.torch import load_file, save_file

    save_file({**load_file(made / "model.safetensors"), **head}, made / "model.safetensors")
    engine = load_engine(settings(made))
    engine.shutdown()
    assert [s.name for s in engine.filler.sources] == ["copy", "mtp"]


def test_a_drafter_for_another_model_is_refused_with_both_numbers(folder: Path, tmp_path: Path) -> None:
    wide = write_folder(tmp_path / "wide", dflash2_raw(vocab_size=97), stored(random_dflash2()))
    with pytest.raises(CheckpointError, match=r"vocab_size is 97, the target model's is 96"):
        load_engine(settings(folder, drafter=str(wide)))
    other = write_folder(tmp_path / "head", mtp_raw(hidden_size=64), stored(random_mtp(), lambda name: "mtp." + name))
    with pytest.raises(CheckpointError, match=r"hidden_size is 64, the target model's is 32"):
        load_engine(settings(folder, mtp=str(other)))
    with pytest.raises(CheckpointError, match="does not exist; check the path given with --drafter"):
        load_engine(settings(folder, drafter=str(tmp_path / "nowhere")))


def test_a_drafter_without_a_mask_token_is_refused(folder: Path, tmp_path: Path) -> None:
    raw = dflash2_raw()
    del raw["dflash_config"]["mask_token_id"]
    nameless = write_folder(tmp_path / "nameless", raw, stored(random_dflash2()))
    with pytest.raises(ConfigError, match="no mask_token_id"):
        load_engine(settings(folder, drafter=str(nameless)))


def test_a_mask_token_given_as_text_is_looked_up_in_the_model_s_tokenizer(folder: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(folder, tmp_path / "model"))
    raw = dflash2_raw()
    raw["dflash_config"]["mask_token_id"] = "<|HOLE|>"
    write_folder(made / "drafter", raw, stored(random_dflash2()))
    (made / "tokenizer.json").write_text('{"added_tokens": [{"id": 95, "content": "<|HOLE|>"}]}')
    engine = load_engine(settings(made, mtp="off"))
    engine.shutdown()
    drafter = engine.filler.sources[1]
    assert drafter.drafter.config.mask_token_id == 95  # type: ignore[attr-defined]
    assert VOCAB == 96
