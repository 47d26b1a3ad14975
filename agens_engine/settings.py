"""One frozen Settings object; this file reads flags, environment variables and [engine] of profiles.

Order, strongest first: flags of the command line, AGENS_<NAME> in the environment, the [engine] table of the profile
file, the defaults below. Each setting is one dataclass field: its name is the TOML key and, upper-cased after AGENS_,
the environment variable. The other tables of a profile belong to the planner.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from agens_engine.errors import UsageError

log = logging.getLogger(__name__)

ENV_PREFIX = "AGENS_"
# Variables of the scripts and of the planner that share the prefix; they are not settings.
_FOREIGN_ENV = ("AGENS_TORCH_INDEX", "AGENS_TEST_", "AGENS_PLAN_")
# Names that the vendor's engine reads; ours wins where both are set.
_VENDOR_ENV = {
    "VOLUNDR_REASONING_BUDGET": "reasoning_budget",
    "VOLUNDR_REASONING_BUDGET_SOFT_BIAS": "reasoning_budget_soft_bias",
}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


def _setting(kind: str, default: Any, **rules: Any) -> Any:
    return field(default=default, metadata={"kind": kind, **rules})


@dataclass(frozen=True)
class Settings:
    """Everything a run can be told. Build it with `Settings.build`; a field that is None means "decide at start-up"."""

    model: str = _setting("text", "nano")
    dtype: str = _setting("choice", "auto", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = _setting("text", "auto")
    context_tokens: int | None = _setting("int", None, low=2)
    max_sequences: int | None = _setting("int", None, low=1, high=4096)
    device_memory: str | None = _setting("text", None)  # a size such as 14GiB: the plan's cap
    host_memory: str | None = _setting("text", None)
    max_waiting: int = _setting("int", 256, low=1)
    weights: str = _setting("choice", "auto", choices=("auto", "dequantise", "packed"))  # quantised linears on a CPU
    repack_cache: str | None = _setting("text", None)  # a folder for repacked weights
    prefill_chunk_tokens: int | None = _setting("int", None, low=16)
    session_cache: bool = _setting("switch", True)  # keep what prompts and answers leave behind for later turns
    session_dir: str | None = _setting("text", None)  # a folder for sessions that outlive the engine
    max_output_tokens: int = _setting("int", 32_768, low=1)

    speculation: bool = _setting("switch", True)
    draft_sources: frozenset[str] | None = _setting("names", None)
    mtp: str | None = _setting("text", None)  # a folder, auto (the model's own), on or off; None: as the profile says
    drafter: str | None = _setting("text", None)
    adaptive_drafts: bool = _setting("switch", True)  # off: every source always fills all the slots it can

    # What a request gets when it does not say; None leaves the choice to the checkpoint's generation_config.
    temperature: float | None = _setting("number", None, low=0.0, high=100.0)
    top_p: float | None = _setting("number", None, low=1e-6, high=1.0)
    top_k: int | None = _setting("int", None, low=0)
    min_p: float | None = _setting("number", None, low=0.0, high=1.0)
    reasoning_budget: int | None = _setting("int", None)  # most tokens of a thought; 0 and below: off
    reasoning_budget_soft_bias: float | None = _setting("number", None, low=-100.0, high=100.0)
    repetition_guard: bool = _setting("switch", True)  # closes a thought that goes round in circles

    host: str = _setting("text", "127.0.0.1")
    port: int = _setting("int", 8000, low=0, high=65_535)
    api_key: str | None = _setting("text", None)
    cors_origins: frozenset[str] = _setting("origins", frozenset())  # web pages that may call the server; * for all
    request_timeout_seconds: float = _setting("number", 0.0, low=0.0)  # 0: a request may take as long as it likes
    max_body_bytes: int = _setting("int", 32 * 2**20, low=1024)
    keep_alive_seconds: float = _setting("number", 10.0, low=0.01)
    drain_seconds: float = _setting("number", 30.0, low=0.0)
    log_level: str = _setting("choice", "info", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting("choice", "text", choices=("text", "json"))
    profile: str | None = _setting("text", None)

    @classmethod
    def build(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        profile_dirs: tuple[Path, ...] | None = None,
    ) -> Settings:
        """Merge the four sources.

        flags         setting name -> value, None meaning "not given on the command line"
        environ       os.environ unless given
        profile_dirs  where `--profile NAME` looks for NAME.toml
        raises        UsageError naming the source, the key, the value and what is allowed (or the nearest known key)
        """
        environ = os.environ if environ is None else environ
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        known = {f.name: f for f in fields(cls)}
        for name in given:
            if name not in known:
                raise UsageError(f"unknown setting {name}{_nearest(name, known)}")
        from_env = _read_environment(environ, known)
        values: dict[str, Any] = {}
        profile = given.get("profile", from_env.get("profile", ("", None))[1])
        if profile not in (None, "auto"):  # auto: the planner picks one for the device; the engine's defaults hold
            values |= _read_profile(str(profile), known, profile_dirs or default_profile_dirs())
        values |= {name: _parse(known[name], value, where) for name, (where, value) in from_env.items()}
        values |= {name: _parse(known[name], value, "--" + name.replace("_", "-")) for name, value in given.items()}
        return cls(**values)

    @property
    def mtp_choice(self) -> str | None:
        """`mtp` as it holds for this run: off when its drafts are not wanted anyway."""
        return self.mtp if self._drafts_from("mtp") else "off"

    @property
    def drafter_choice(self) -> str | None:
        return self.drafter if self._drafts_from("dflash") else "off"

    def _drafts_from(self, source: str) -> bool:
        return self.speculation and (self.draft_sources is None or source in self.draft_sources)


def default_profile_dirs() -> tuple[Path, ...]:
    """The repository's profiles/ in a checkout, then the installed share/agens-engine/profiles."""
    return (
        Path(__file__).resolve().parent.parent / "profiles",
        Path(sys.prefix) / "share" / "agens-engine" / "profiles",
    )


def find_profile(profile: str, dirs: tuple[Path, ...] | None = None) -> Path:
    """The TOML file of a profile name or path; raises UsageError listing the known names."""
    dirs = dirs or default_profile_dirs()
    path = Path(profile).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise UsageError(f"profile file {profile} does not exist")
    for folder in dirs:
        if (folder / f"{profile}.toml").is_file():
            return folder / f"{profile}.toml"
    names = sorted({p.stem for folder in dirs if folder.is_dir() for p in folder.glob("*.toml")})
    listed = f"; known profiles: {', '.join(names)}" if names else "; no profiles are installed"
    raise UsageError(f"unknown profile {profile!r}{listed}; a path to a .toml file works too")


def _read_profile(profile: str, known: Mapping[str, Field[Any]], dirs: tuple[Path, ...]) -> dict[str, Any]:
    path = find_profile(profile, dirs)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"profile {path} is not valid TOML: {error}") from error
    section = table.get("engine", {})
    if not isinstance(section, dict):
        raise UsageError(f"profile {path}: engine must be a table, [engine]")
    values = {}
    for key, value in section.items():
        if key not in known or key == "profile":
            raise UsageError(f"profile {path}: unknown key {key} in [engine]{_nearest(key, known)}")
        values[key] = _parse(known[key], value, f"profile {path}: {key}")
    return values


def _read_environment(environ: Mapping[str, str], known: Mapping[str, Field[Any]]) -> dict[str, tuple[str, str]]:
    """Setting name -> (variable, raw value). An empty variable counts as unset."""
    vendor = {name: (variable, environ.get(variable, "")) for variable, name in _VENDOR_ENV.items()}
    found = {name: given for name, given in vendor.items() if given[1] != ""}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_FOREIGN_ENV) or value == "":
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in known:
            found[name] = (variable, value)
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            raise UsageError(f"unknown environment variable {variable}; did you mean {ENV_PREFIX}{near[0].upper()}?")
        else:
            log.warning("environment variable %s is not a setting of this engine", variable)
    return found


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"


def _parse(setting: Field[Any], value: Any, where: str) -> Any:
    """Check one value, given as text or already typed, against the setting's rules."""
    rules = setting.metadata
    kind = rules["kind"]
    if kind == "text":
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where} must be text, not {value!r}")
        return value
    if kind == "choice":
        text = str(value).lower()
        if text not in rules["choices"]:
            raise UsageError(f"{where} must be one of {', '.join(rules['choices'])}, not {value!r}")
        return text
    if kind == "switch":
        if isinstance(value, bool):
            return value
        if str(value).lower() not in _SWITCH:
            raise UsageError(f"{where} must be on or off, not {value!r}")
        return _SWITCH[str(value).lower()]
    if kind == "names":
        return _parse_names(value, where)
    if kind == "origins":
        return _parse_origins(value, where)
    return _parse_number(value, where, rules, whole=kind == "int")


def _parse_names(value: Any, where: str) -> frozenset[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in names):
        raise UsageError(f"{where} must be a list of names, not {value!r}")
    return frozenset(name.strip() for name in names if name.strip() and name.strip().lower() != "none")


def _parse_origins(value: Any, where: str) -> frozenset[str]:
    """Origins as browsers send them: a path or a slash at the end is an error, not a rule that never fits."""
    origins = _parse_names(value, where)
    for origin in sorted(origins):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"{where} must be * or an origin such as http://localhost:3000, not {origin!r}")
    return origins


def _parse_number(value: Any, where: str, rules: Mapping[str, Any], *, whole: bool) -> int | float:
    what = "a whole number" if whole else "a number"
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number: int | float
        if whole:
            if isinstance(value, float):
                raise ValueError
            number = int(value)
        else:
            number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except ValueError:
        raise UsageError(f"{where} must be {what}, not {value!r}") from None
    low, high = rules.get("low"), rules.get("high")
    if (low is not None and number < low) or (high is not None and number > high):
        limits = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise UsageError(f"{where} must be {limits}, not {value}")
    return number
