"""The long-context benchmark's own gates at short lengths: bytes within the plan, logits as all resident."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench_long_context import contexts_of, measure, nano_hit_rates


def test_contexts_of_the_table() -> None:
    assert contexts_of(262_144) == [8_192, 32_768, 131_072, 262_144]
    assert contexts_of(2_000) == [2_000]


@pytest.mark.parametrize(("window", "context", "hot"), [(128, 2_000, 64), (128, 1_500, 0), (512, 1_500, 16)])
def test_a_short_run(tmp_path: Path, window: int, context: int, hot: int) -> None:
    check(measure(tmp_path / "m", window, context, 256, hot, reference=True), hot)


@pytest.mark.slow
@pytest.mark.parametrize("window", [128, 4_096])
def test_a_longer_run(tmp_path: Path, window: int) -> None:
    check(measure(tmp_path / "m", window, 16_384, 1_024, 256, reference=True), 256)


def check(found: dict, hot: int) -> None:  # type: ignore[type-arg]
    assert found["bit_identical"] and found["max_logit_difference"] == 0.0
    for row in found["rows"]:
        assert 0 < row["device_bytes"] <= row["planned_bytes"]
        assert row["bytes_per_token"] == 2 * (2 * 16 + 16) * 4 / 4  # layers, K + V + block key, float32, blocks of 4
        assert row["hit_rate"] > 0 if hot else row["hit_rate"] == 0
        assert 0 < row["scan_ms"] < row["decode_ms"]
    assert found["staged_bytes"] > 0


@pytest.mark.slow
def test_nano_finds_its_blocks_in_the_cache() -> None:
    found = nano_hit_rates(1, 24, (0, 256))
    assert found["0"]["hit_rate"] == 0.0
    assert found["256"]["hit_rate"] > 0.5
    assert found["256"]["miss_bytes_per_token"] < found["0"]["miss_bytes_per_token"]
