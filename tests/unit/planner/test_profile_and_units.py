"""Profiles, overrides, sizes: what is accepted, and one clear line for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from agens_planner import (
    DeviceFacts,
    PlannerInputError,
    choose_profile,
    environment_overrides,
    format_size,
    load_profile,
    parse_size,
)
from agens_planner.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("14GiB", 14 * GIB),
        ("512MiB", 512 * MIB),
        ("16GB", 16 * 10**9),
        ("1.5 gib", 3 * GIB // 2),
        ("0", 0),
        (1024, 1024),
        ("64kB", 64_000),
        ("1_000", 1000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["14Gb1", "GiB", "", "1e9", "-3GiB", "14QiB", "100TiB", "nan", "1.2.3GiB", True, None, 2.5]
)
def test_wrong_sizes_name_the_place(text: object) -> None:
    with pytest.raises(PlannerInputError, match="--device-memory"):
        parse_size(text, "--device-memory")  # type: ignore[arg-type]


def test_an_unknown_unit_gets_the_nearest() -> None:
    with pytest.raises(PlannerInputError, match="did you mean GiB"):
        parse_size("14GiBB")


def test_format_size() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 408 * MIB, 16 * GIB, -GIB)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "408.0 MiB",
        "16.00 GiB",
        "-1.00 GiB",
    ]


def test_shipped_profiles_load() -> None:
    caps = {name: load_profile(name).cap_bytes for name in ("12gb", "16gb", "24gb", "cpu")}
    assert caps == {"12gb": 12 * GIB, "16gb": 16 * GIB, "24gb": 23 * GIB, "cpu": 4 * GIB}
    assert load_profile("cpu").device == "cpu"


def test_overrides_win_and_are_typed() -> None:
    profile = load_profile(
        "16gb", {"cap_bytes": "14GiB", "context_tokens": "max", "sequences": "3", "mtp": "on", "x": None}
    )
    assert (profile.cap_bytes, profile.context_tokens, profile.sequences, profile.mtp) == (14 * GIB, None, 3, "on")
    assert profile.replace(cap_bytes="13GiB").cap_bytes == 13 * GIB


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cap_byte": "1GiB"}, "did you mean cap_bytes"),
        ({"sequences": 0}, "between 1 and 4,096"),
        ({"sequences": "three"}, "whole number"),
        ({"cap_bytes": "0"}, "more than 0"),
        ({"cap_bytes": "256MiB"}, "leaves nothing"),
        ({"head_bits": 5}, "4, 8 or 16"),
        ({"fp8_far": "maybe"}, "one of auto, on, off"),
        ({"images": "perhaps"}, "on or off"),
        ({"dtype": "int4"}, "one of bfloat16"),
        ({"weight_bits": "40"}, "between 1 and 16"),
        ({"chunk_tokens_min": 8192}, "above chunk_tokens_max"),
        ({"context_tokens": "max", "sequences": "max"}, "cannot both be max"),
        ({"page_tokens": 1.5}, "whole number"),
    ],
)
def test_wrong_overrides(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerInputError, match=message):
        load_profile("16gb", overrides)


def test_labels_replace_key_names_in_messages() -> None:
    with pytest.raises(PlannerInputError, match="^--device-memory: unknown unit"):
        load_profile("16gb", {"cap_bytes": "14QiB"}, labels={"cap_bytes": "--device-memory"})


def test_wrong_profile_files(tmp_path: Path) -> None:
    with pytest.raises(PlannerInputError, match="did you mean 16gb"):
        load_profile("16gbb")
    with pytest.raises(PlannerInputError, match="does not exist"):
        load_profile("./nowhere.toml")
    path = tmp_path / "mine.toml"
    for text, message in (
        ("[plan", "not valid TOML"),
        ("plan = 3", "must be a table"),
        ('cap_bytes = "1GiB"', "move it under"),
        ("[plans]\nsequences = 1", "mine.toml: unknown table or key plans; did you mean plan"),
        ("[engin]\nport = 1", "unknown table or key engin; did you mean engine"),
        ("[plan]\nsequences = 1\n[tools]\nx = 1", "unknown table or key tools; known: engine, plan"),
        ("verbose = true", "unknown table or key verbose; known: engine, plan"),
        ('[plan]\ncap_bites = "1GiB"', "mine.toml: unknown key cap_bites; did you mean cap_bytes"),
        ('[plan]\ncap_bytes = "1GiBB"', "mine.toml: cap_bytes: unknown unit"),
    ):
        path.write_text(text)
        with pytest.raises(PlannerInputError, match=message):
            load_profile(str(path))
    path.write_text("[engine]\nport = 1\n")
    assert load_profile(str(path)).name == "mine"  # other rooms' tables are theirs


def test_environment() -> None:
    assert environment_overrides({"AGENS_PLAN_CAP_BYTES": "8GiB", "AGENS_PORT": "1", "AGENS_PLAN_BUILD": ""}) == {
        "cap_bytes": "8GiB"
    }
    with pytest.raises(PlannerInputError, match="AGENS_PLAN_CAP_BYTE; did you mean cap_bytes"):
        environment_overrides({"AGENS_PLAN_CAP_BYTE": "8GiB"})


def test_auto_picks_the_largest_profile_a_card_can_hold() -> None:
    def choose(gib: float) -> str:
        return choose_profile(DeviceFacts("cuda", "card", int(gib * GIB)))

    assert [choose(g) for g in (11.7, 15.6, 23.6, 31.5, 80)] == ["12gb", "16gb", "24gb", "24gb", "24gb"]
    assert choose_profile(None) == choose_profile(DeviceFacts("cpu")) == "cpu"
