"""Token history: counts per row."""

from __future__ import annotations

from agens_engine.sampling.history import TokenHistory


def table(history: TokenHistory, drafts: tuple[int, ...]) -> list[dict[int, tuple[bool, float]]]:
    ids, seen, counts = history.rows(drafts)
    assert len(set(ids.tolist())) == len(ids)
    return [
        dict(zip(ids.tolist(), zip(s, c, strict=True), strict=True))
        for s, c in zip(seen.tolist(), counts.tolist(), strict=True)
    ]


def test_rows_add_the_drafts_before_them():
    history = TokenHistory([7, 7, 3])
    history.append([3, 5])
    rows = table(history, (9, 3, 9))
    assert rows[0] == {3: (True, 1), 5: (True, 1), 7: (True, 0), 9: (False, 0)}
    assert rows[1] == {3: (True, 1), 5: (True, 1), 7: (True, 0), 9: (True, 1)}
    assert rows[2] == {3: (True, 2), 5: (True, 1), 7: (True, 0), 9: (True, 1)}
    assert rows[3] == {3: (True, 2), 5: (True, 1), 7: (True, 0), 9: (True, 2)}


def test_asking_for_rows_changes_nothing():
    history = TokenHistory([1])
    before = table(history, ())
    history.rows((4, 4, 1))
    assert table(history, ()) == before


def test_many_distinct_tokens():
    history = TokenHistory()
    history.append(range(1000))
    history.append(range(500))
    (row,) = table(history, ())
    assert row == {t: (True, 2.0 if t < 500 else 1.0) for t in range(1000)}
