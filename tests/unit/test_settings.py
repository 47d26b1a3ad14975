"""Settings: precedence, types, and errors that name the source and the nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agens_engine.errors import UsageError
from agens_engine.settings import Settings, find_profile


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[Path, ...]:
    (tmp_path / "16gb.toml").write_text(
        '[device]\ncap_bytes = 17179869184\n\n[engine]\nmax_sequences = 4\nport = 9001\nspeculation = false\n'
        'draft_sources = ["context_copy"]\ntemperature = 0.5\n'
    )
    return (tmp_path,)


def test_defaults_need_nothing() -> None:
    settings = Settings.build({}, environ={})
    assert settings == Settings()
    assert settings.host == "127.0.0.1" and settings.max_output_tokens == 32_768 and settings.model == "nano"


def test_order_is_flags_environment_profile_defaults(profiles: tuple[Path, ...]) -> None:
    settings = Settings.build(
        {"profile": "16gb", "port": 9003, "model": None},
        environ={"AGENS_PORT": "9002", "AGENS_MAX_SEQUENCES": "6"},
        profile_dirs=profiles,
    )
    assert settings.port == 9003
    assert settings.max_sequences == 6
    assert settings.speculation is False and settings.temperature == 0.5
    assert settings.draft_sources == frozenset({"context_copy"})
    assert settings.profile == "16gb" and settings.model == "nano"


def test_profile_may_come_from_the_environment_and_be_a_path(profiles: tuple[Path, ...]) -> None:
    path = str(profiles[0] / "16gb.toml")
    assert Settings.build({}, environ={"AGENS_PROFILE": path}).port == 9001
    assert find_profile("16gb", profiles) == profiles[0] / "16gb.toml"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AGENS_PORT": "eighty"}, "AGENS_PORT must be a whole number, not 'eighty'"),
        ({"AGENS_PORT": "70000"}, "AGENS_PORT must be between 0 and 65535, not 70000"),
        ({"AGENS_TEMPERATURE": "nan"}, "AGENS_TEMPERATURE must be a number, not 'nan'"),
        ({"AGENS_SPECULATION": "maybe"}, "AGENS_SPECULATION must be on or off"),
        ({"AGENS_DTYPE": "int3"}, "AGENS_DTYPE must be one of auto, float32"),
        ({"AGENS_MAX_SEQUENCE": "3"}, "unknown environment variable AGENS_MAX_SEQUENCE; did you mean AGENS_MAX_SEQ"),
    ],
)
def test_environment_errors_name_the_variable(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match="^" + expected):
        Settings.build({}, environ=environ)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[engine]\nmax_sequenced = 3\n", r"unknown key max_sequenced in \[engine\]; did you mean max_sequences\?"),
        ("[engine]\nport = true\n", "port must be a whole number, not True"),
        ("[engine]\nport = 1.5\n", "port must be a whole number, not 1.5"),
        ("[engine\n", "is not valid TOML"),
        ("engine = 3\n", "engine must be a table"),
    ],
)
def test_profile_errors_name_file_and_key(tmp_path: Path, toml: str, expected: str) -> None:
    (tmp_path / "bad.toml").write_text(toml)
    with pytest.raises(UsageError, match=expected) as caught:
        Settings.build({"profile": "bad"}, environ={}, profile_dirs=(tmp_path,))
    assert "bad.toml" in str(caught.value)


def test_unknown_profile_lists_the_known_ones(profiles: tuple[Path, ...]) -> None:
    with pytest.raises(UsageError, match="unknown profile '24gb'; known profiles: 16gb"):
        Settings.build({"profile": "24gb"}, environ={}, profile_dirs=profiles)
    with pytest.raises(UsageError, match="does not exist"):
        Settings.build({"profile": "./missing.toml"}, environ={})


@pytest.mark.parametrize("value", [True, "x", 1.5, [1]])
def test_flag_of_wrong_type_names_the_flag(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^--max-sequences must be a whole number"):
        Settings.build({"max_sequences": value}, environ={})


def test_foreign_and_empty_variables_are_left_alone() -> None:
    environ = {"AGENS_TORCH_INDEX": "x", "AGENS_PLAN_IMAGES": "on", "AGENS_PORT": "", "OTHER": "1"}
    assert Settings.build({}, environ=environ) == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]
