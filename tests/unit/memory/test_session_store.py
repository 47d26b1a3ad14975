"""The session store and its files: exact prefixes, budget, pages; copies are the same bytes wherever they went."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agens_engine.errors import UsageError
from agens_engine.memory.session_files import SessionFiles, fingerprint
from agens_engine.memory.session_store import Entry, Prefix, SessionStore
from agens_engine.memory.snapshot import Snapshot
from agens_engine.memory.state import SequenceState, StatePool
from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from tests.modelkit import CPU, new_pool, random_model

IDS = torch.randint(0, 96, (600,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def model() -> Volundr:
    return random_model()


@pytest.fixture
def pool(model: Volundr) -> Iterator[StatePool]:
    made = new_pool(model, 2)
    yield made
    made.check([])


@torch.inference_mode()
def run(model: Volundr, state: SequenceState, ids: list[int]) -> torch.Tensor:
    hidden, _ = model(StepBatch([(state, ids)], CPU))
    return model.logits(hidden)


def entry_of(model: Volundr, pool: StatePool, ids: list[int]) -> Entry:
    """What these tokens leave behind."""
    state = pool.create()
    run(model, state, ids)
    state.commit(len(ids))
    entry = Entry(Prefix(ids), state.snapshot(), {"dflash.0.rows": torch.arange(6.0).view(2, 3)})
    state.free()
    return entry


def copied(entry: Entry) -> Entry:
    """All of it on the host."""
    assert isinstance(entry.memory, Snapshot)
    return Entry(entry.prefix, entry.memory.to_host(), entry.drafters)


def files_in(folder: Path, **changes: object) -> SessionFiles:
    options = {"model": "m1", "dtype": "float32", "limit_bytes": 1 << 30, **changes}
    return SessionFiles(folder, **options)  # type: ignore[arg-type]


def saved(folder: Path, *entries: Entry) -> list[Path]:
    files_in(folder).close(entries)
    return sorted(folder.glob("*.session"))


def same(a: Entry, b: Entry) -> bool:
    assert isinstance(a.memory, dict) and isinstance(b.memory, dict)
    if a.memory.keys() != b.memory.keys() or a.drafters.keys() != b.drafters.keys():
        return False
    pairs = [(a.memory[key], b.memory[key]) for key in a.memory]
    pairs += [(a.drafters[key], b.drafters[key]) for key in a.drafters]
    return a.prefix.equals(b.prefix) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_prefix_names_do_not_depend_on_where_else_it_is_cut() -> None:
    whole = Prefix(IDS[:100], ((3, "a"), (40, "b")))
    names = list(whole.names([10, 3, 41, 100]))
    assert [length for length, _ in names] == [3, 10, 41, 100]
    for length, digest in names:
        assert whole.cut(length).name == (length, digest)
    assert Prefix(IDS[:100]).name != whole.name
    assert Prefix(IDS[:3]).name == whole.cut(3).name  # the image begins behind it


def test_g3_the_longest_stored_session_prefix_wins(model: Volundr, pool: StatePool) -> None:
    store = SessionStore(1 << 30)
    for length in (100, 150, 300):
        store.put(entry_of(model, pool, IDS[:length]))
    found = [store.find(Prefix(ids), limit) for ids, limit in ((IDS[:400], 399), (IDS[:300], 299), (IDS[:99], 98))]
    assert [entry and entry.num_tokens for entry in found] == [300, 150, None]
    assert store.find(Prefix([*IDS[:140], 1, 2]), 141) is store.find(Prefix(IDS[:100]), 100)
    assert store.find(Prefix([(IDS[0] + 1) % 96, *IDS[1:200]]), 200) is None
    store.check()
    pool.check([], store.snapshots())
    store.clear()


def test_session_budget_drops_the_least_recently_used(model: Volundr, pool: StatePool) -> None:
    entries = [entry_of(model, pool, IDS[i : i + 130]) for i in range(4)]
    lost: list[Entry] = []
    store = SessionStore(sum(entry.num_bytes for entry in entries[:3]), lost.append)
    for entry in entries[:3]:
        assert store.put(entry)
    assert store.has(entries[0].prefix)
    store.put(entries[3])
    assert lost == [entries[1]] and store.counts.evicted == 1
    assert [entry for entry in store] == [entries[3], entries[0], entries[2]]
    store.check()
    large = entry_of(model, pool, IDS)
    store.budget_bytes = large.num_bytes - 1
    assert not store.put(large) and store.counts.refused == 1
    store.clear()
    pool.check([])


def test_session_pages_move_to_the_host_while_the_budget_holds_them(model: Volundr, pool: StatePool) -> None:
    entries = [entry_of(model, pool, IDS[i : i + 300]) for i in range(3)]
    room = entries[0].memory.host_bytes - entries[0].memory.num_bytes  # type: ignore[union-attr]
    store = SessionStore(sum(entry.num_bytes for entry in entries) + room)
    for entry in entries:
        store.put(entry)
    free = pool.pages.pages_free
    entries[1].pinned = True
    store.give_pages(lambda: pool.pages.pages_free >= free + 4)
    entries[1].pinned = False
    # the first moved, the pinned one stayed, the last had no room left and went
    assert (store.counts.moved_to_host, store.counts.evicted) == (1, 1)
    assert isinstance(entries[0].memory, dict) and isinstance(entries[1].memory, Snapshot)
    assert pool.pages.pages_free == free + 4
    store.check()
    pool.check([], store.snapshots())
    store.clear()


@pytest.mark.parametrize("length", [5, 127, 128, 129, 333])
def test_g4_snapshot_round_trip_through_host_and_disk_is_byte_equal(
    model: Volundr, pool: StatePool, tmp_path: Path, length: int
) -> None:
    entry = entry_of(model, pool, IDS[:length])
    state = pool.create()
    state.restore(entry.memory)
    direct = run(model, state, IDS[length : length + 9])
    host = copied(entry)
    saved(tmp_path, host)
    files = files_in(tmp_path)
    prompt = Prefix(IDS[: length + 50])
    name = files.find(prompt, length + 49)
    assert name == host.prefix.name and files.find(prompt, length - 1) is None
    loaded = files.load(name, prompt)
    assert loaded is not None and same(loaded, host)
    for source in (host, loaded):
        state.restore(source.memory)
        assert state.num_tokens == length
        again = Entry(source.prefix, state.snapshot(), source.drafters)
        assert same(copied(again), host)
        assert torch.equal(run(model, state, IDS[length : length + 9]), direct)
    state.free()
    files.close([])


def test_snapshot_files_that_are_damaged_are_ignored(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = copied(entry_of(model, pool, IDS[:200]))
    (file,) = saved(tmp_path, entry)
    good = file.read_bytes()
    size = len(good)
    flips = [0, 13, 20, size // 2, size - 40, size - 1]
    damaged = [good[:n] for n in (0, 5, 16, 60, size // 2, size - 1)] + [good + b"x"]
    damaged += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in flips]
    damaged.append(good[:12] + struct.pack("<I", 1 << 31) + good[16:])
    for data in damaged:
        file.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            files, prompt = files_in(tmp_path), Prefix(IDS[:300])
            name = files.find(prompt, 299)
            assert name is None or files.load(name, prompt) is None
            assert "is ignored" in caplog.text and files.num_ignored == 1
            assert files.find(prompt, 299) is None
        files.close([])


def test_snapshot_files_of_another_model_dtype_or_version_are_ignored(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = copied(entry_of(model, pool, IDS[:200]))
    (file,) = saved(tmp_path, entry)
    for change in ({"model": "m2"}, {"dtype": "bfloat16"}):
        files = files_in(tmp_path, **change)
        assert len(files) == 0 and f"its {next(iter(change))} is" in caplog.text
        files.close([])
    monkeypatch.setattr("agens_engine.memory.session_files.FORMAT_VERSION", 99)
    files = files_in(tmp_path)
    assert len(files) == 0 and "its version is 1, this engine's is 99" in caplog.text
    files.close([])
    assert file.exists()


def test_a_session_file_under_the_name_of_another_is_ignored(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checksum holds, the tokens do not: they are compared, not their digest."""
    entry = copied(entry_of(model, pool, IDS[:200]))
    saved(tmp_path, entry)
    files = files_in(tmp_path)
    other = Prefix([*IDS[1:201], 5])
    files._files = {other.cut(200).name: next(iter(files._files.values()))}
    name = files.find(other, 200)
    assert name is not None and files.load(name, other) is None
    assert "it holds other tokens" in caplog.text
    files.close([])


def test_session_folder_keeps_its_limit_and_leaves_no_scraps(model: Volundr, pool: StatePool, tmp_path: Path) -> None:
    entries = [copied(entry_of(model, pool, IDS[i : i + 130])) for i in range(4)]
    (file,) = saved(tmp_path, entries[0])
    files = files_in(tmp_path, limit_bytes=int(2.5 * file.stat().st_size))
    for entry in entries[1:]:
        files.save_later(entry)
        while files.num_written < entries.index(entry):  # the writer is never behind here, so all are written
            time.sleep(0.001)
    files.close([])
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2 and all(path.suffix == ".session" for path in left)
    assert {path.name.partition("-")[0] for path in left} == {e.prefix.name[1].hex() for e in entries[2:]}


def test_a_full_disk_costs_the_session_file_and_nothing_else(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    entry = copied(entry_of(model, pool, IDS[:200]))
    monkeypatch.setattr("agens_engine.memory.session_files.os.fsync", full)
    assert saved(tmp_path, entry) == []
    assert "could not be written" in caplog.text and not list(tmp_path.iterdir())


def test_the_session_writer_outlives_any_failure(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(tensors: object) -> bytes:
        raise MemoryError

    entries = [copied(entry_of(model, pool, IDS[i : i + 130])) for i in range(3)]
    files = files_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("agens_engine.memory.session_files.safetensors.torch.save", no_memory)
        files.save_later(entries[0])
        while not caplog.records:
            time.sleep(0.001)
    files.save_later(entries[1])
    files.close(entries[1:])  # would wait for ever without a writer
    assert files.num_written == 2 and len(list(tmp_path.iterdir())) == 2


def test_a_session_larger_than_its_folder_leaves_the_others_alone(
    model: Volundr, pool: StatePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = copied(entry_of(model, pool, IDS[:20])), copied(entry_of(model, pool, IDS))
    (file,) = saved(tmp_path, small)
    files = files_in(tmp_path, limit_bytes=file.stat().st_size + 1)
    files.save_later(large)
    files.close([])
    assert list(tmp_path.iterdir()) == [file] and "more than" in caplog.text


def test_a_session_that_cannot_be_handed_over_gives_its_pages_back(model: Volundr, pool: StatePool) -> None:
    def broken(entry: Entry) -> None:
        raise MemoryError

    entries = [entry_of(model, pool, IDS[i : i + 300]) for i in range(2)]
    store = SessionStore(entries[0].num_bytes, broken)
    store.put(entries[0])
    with pytest.raises(MemoryError):
        store.make_room(entries[0].num_bytes)
    entries[1].memory.release()  # type: ignore[union-attr]
    store.check()
    pool.check([], store.snapshots())


def test_a_session_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--session-dir"):
        files_in(tmp_path / "file" / "sessions")


def test_session_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = bytearray(5 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    weights[-1] = 1
    (folder / "model.safetensors").write_bytes(weights)
    assert fingerprint(folder) != before
