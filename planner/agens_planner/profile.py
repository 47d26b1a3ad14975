"""A run profile: what the plan may use and what it may choose. Read from the [plan] table of profiles/NAME.toml.

The [engine] table of the same file belongs to the engine's settings and is not looked at here; any other name at the
top of the file is a mistake. Strongest first: overrides handed in by the caller (flags), AGENS_PLAN_<KEY> in the
environment, the file, the defaults below.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from agens_planner.errors import PlannerInputError, nearest
from agens_planner.facts import DeviceFacts
from agens_planner.units import GIB, MIB, parse_size

ENV_PREFIX = "AGENS_PLAN_"
TABLES = frozenset({"plan", "engine"})
_SWITCH = {"on": "on", "true": "on", "yes": "on", "1": "on", "off": "off", "false": "off", "no": "off", "0": "off"}


def _key(kind: str, default: Any, help: str, **rules: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help, **rules})


@dataclass(frozen=True)
class Profile:
    """Everything the planner can be told; a field's name is its TOML key. Sizes are bytes once loaded.

    None stands for the word in the file: "max" (search for it) or "auto" (let the plan choose).
    """

    name: str = "default"
    description: str = _key("text", "", "shown above the table")
    device: str = _key("choice", "cuda", "what holds the device lines", choices=("cuda", "cpu"))
    dtype: str = _key(
        "choice", "bfloat16", "unquantised weights, KV, activations", choices=("bfloat16", "float16", "float32")
    )

    cap_bytes: int = _key("size", 16 * GIB, "hard limit of this process on the device", low=1)
    cap_margin_bytes: int = _key("size", 0, "stay this far below the cap: what no plan can see")
    headroom_bytes: int = _key("size", 128 * MIB, "planned but unused: short-lived surprises")
    display_reserve_bytes: int = _key("size", 0, "for a desktop that starts later; measured use counts if larger")
    host_bytes: int | None = _key("size", None, "host memory the plan may use", word="auto")
    host_headroom_bytes: int = _key("size", 512 * MIB, "host memory left to the rest of the machine")
    pinned_bytes: int | None = _key("size", None, "most page-locked host memory", word="auto")
    snapshot_bytes: int = _key("size", 2 * GIB, "host budget of stored sessions; shrinks before a plan is refused")
    load_buffer_bytes: int = _key("size", 2 * GIB, "host memory while loading and repacking weights")

    context_tokens: int | None = _key("int", None, "tokens per sequence", word="max", low=1, high=2**31)
    sequences: int | None = _key("int", 1, "sequences in flight", word="max", low=1, high=4096)
    page_tokens: int = _key("int", 256, "contexts are multiples of this", low=16, high=65536)
    chunk_tokens_max: int = _key("int", 4096, "longest prefill chunk the plan may choose", low=16, high=65536)
    chunk_tokens_min: int = _key("int", 512, "shortest prefill chunk the plan may choose", low=16, high=65536)

    drafter: str = _key(
        "choice", "auto", "DFlash2 drafter; auto: when the model has one", choices=("auto", "on", "off")
    )
    mtp: str = _key("choice", "off", "MTP head; auto: when the model has one", choices=("auto", "on", "off"))
    images: str = _key("switch", "off", "vision tower")
    head_bits: int = _key("bits", 4, "output head, quantised at load: 4, 8, or 16 for as stored")
    drafter_bits: int = _key("bits", 4, "drafter linears, quantised at load")
    mtp_bits: int = _key("bits", 4, "MTP linears, quantised at load")
    build: str = _key("text", "engine-2.82", "which build of a shape card")
    weight_bits: str = _key("average", "auto", "average bits of packed weights, when the checkpoint does not say")

    mtp_context_tokens: int = _key("int", 16384, "window of the MTP head's own KV", low=16, high=2**31)
    hot_cache_blocks: int = _key("int", 2048, "far blocks cached on the device per host layer and sequence", high=2**20)
    image_pixels_max: int = _key("int", 16_777_216, "largest image; larger ones are scaled down", low=1024, high=2**28)

    hot_hit_percent: int | None = _key(
        "int", None, "measured hits of the hot cache, for the forecast only", word="auto", high=100
    )
    tables: str = _key(
        "choice", "ram", "embedding and Engram tables: in host memory, or mapped from disk", choices=("ram", "mmap")
    )
    far_resident_layers: int | None = _key("int", None, "far pools kept on the device", word="auto", high=10_000)
    vision: str = _key("choice", "auto", "where the tower's weights live", choices=("auto", "resident", "staged"))
    fp8_far: str = _key("choice", "auto", "far pool and block keys in fp8", choices=("auto", "on", "off"))
    fp8_dense: str = _key("choice", "auto", "KV of dense layers in fp8", choices=("auto", "on", "off"))

    def __post_init__(self) -> None:
        if self.chunk_tokens_min > self.chunk_tokens_max:
            raise PlannerInputError(
                f"profile {self.name}: chunk_tokens_min {self.chunk_tokens_min} is above "
                f"chunk_tokens_max {self.chunk_tokens_max}"
            )
        if self.context_tokens is None and self.sequences is None:
            raise PlannerInputError("context and sequences cannot both be max; give one of them a number")
        if self.cap_margin_bytes >= self.cap_bytes:
            raise PlannerInputError(
                f"profile {self.name}: cap_margin_bytes {self.cap_margin_bytes} leaves nothing of "
                f"cap_bytes {self.cap_bytes}"
            )

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def replace(self, **changes: Any) -> Profile:
        """A copy with values as a user would write them (`cap_bytes="14GiB"`), checked like a file's."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Profile(**values | _parse_all(changes, "override"))


KEYS: dict[str, Field[Any]] = {f.name: f for f in fields(Profile) if f.metadata}


def profile_dirs() -> tuple[Path, ...]:
    """profiles/ of a checkout, then of an installation."""
    return Path(__file__).resolve().parents[2] / "profiles", Path(sys.prefix) / "share" / "agens-engine" / "profiles"


def load_profile(
    name_or_path: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    dirs: tuple[Path, ...] | None = None,
) -> Profile:
    """Read a profile by name or path and lay the overrides over it.

    overrides  key -> value as text or typed; None means not given
    labels     key -> what the user typed instead (`--device-memory`), for messages
    raises     PlannerInputError naming file and key, with the nearest valid name for an unknown one
    """
    path = find_profile(name_or_path, dirs or profile_dirs())
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlannerInputError(f"profile {path} is not valid TOML: {error}") from error
    table = document.get("plan", {})
    if not isinstance(table, dict):
        raise PlannerInputError(f"profile {path}: plan must be a table, [plan]")
    stray = sorted(set(document) & set(KEYS))
    if stray:
        raise PlannerInputError(f"profile {path}: {stray[0]} stands outside a table; move it under [plan]")
    unknown = sorted(set(document) - TABLES)
    if unknown:
        raise PlannerInputError(f"profile {path}: unknown table or key {unknown[0]}{nearest(unknown[0], TABLES)}")
    values = _parse_all(table, f"profile {path.name}")
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    values |= _parse_all(given, "override", labels or {})
    return Profile(name=path.stem, **values)


def find_profile(name_or_path: str, dirs: tuple[Path, ...]) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise PlannerInputError(f"profile file {name_or_path} does not exist")
    for folder in dirs:
        if (folder / f"{name_or_path}.toml").is_file():
            return folder / f"{name_or_path}.toml"
    names = {p.stem for folder in dirs if folder.is_dir() for p in folder.glob("*.toml")} | {"auto"}
    raise PlannerInputError(
        f"unknown profile {name_or_path!r}{nearest(name_or_path, names)} (or a path to a .toml file)"
    )


def choose_profile(device: DeviceFacts | None) -> str:
    """The profile that `--profile auto` means for a device: the largest whose cap it can hold."""
    if device is None or device.kind == "cpu":
        return "cpu"
    total = device.total_bytes or 0
    # A card sold as 24 GB reports a little under 24 GiB, one sold as 16 GB a little under 16.
    if total >= 23 * GIB:
        return "24gb"
    return "16gb" if total >= 15 * GIB else "12gb"


def environment_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """AGENS_PLAN_<KEY> variables as overrides; an empty one counts as unset.

    raises  PlannerInputError for an unknown key, with the nearest valid name
    """
    found = {}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and value != "":
            key = variable.removeprefix(ENV_PREFIX).lower()
            if key not in KEYS:
                raise PlannerInputError(f"unknown environment variable {variable}{nearest(key, KEYS)}")
            found[key] = value
    return found


def _parse_all(values: Mapping[str, Any], where: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    parsed = {}
    for key, value in values.items():
        if key not in KEYS:
            raise PlannerInputError(f"{where}: unknown key {key}{nearest(key, KEYS)}")
        parsed[key] = _parse(KEYS[key], value, (labels or {}).get(key, f"{where}: {key}"))
    return parsed


def _parse(key: Field[Any], value: Any, where: str) -> Any:
    rules = key.metadata
    kind, word = rules["kind"], rules.get("word")
    if word is not None and (value is None or str(value).strip().lower() == word):
        return None
    if kind == "size":
        size = parse_size(value, where)
        if size < rules.get("low", 0):
            raise PlannerInputError(f"{where} must be more than 0")
        return size
    if kind == "int":
        return _parse_int(value, where, rules.get("low", 0), rules["high"], word)
    if kind == "bits":
        bits = _parse_int(value, where, 2, 16, None)
        if bits not in (4, 8, 16):
            raise PlannerInputError(f"{where} must be 4, 8 or 16, not {value}")
        return bits
    if kind == "average":
        return _parse_average(value, where)
    text = str(value).strip()
    if kind == "switch":
        text = _SWITCH.get(text.lower(), "")
        if not text:
            raise PlannerInputError(f"{where} must be on or off, not {value!r}")
        return text
    if kind == "choice":
        choices = rules["choices"]
        text = _SWITCH.get(text.lower(), text.lower()) if "on" in choices else text.lower()
        if text not in choices:
            raise PlannerInputError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
    return text


def _parse_int(value: Any, where: str, low: int, high: int, word: str | None) -> int:
    allowed = f"a whole number between {low:,} and {high:,}" + (f", or {word}" if word else "")
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError
        number = int(value)
    except ValueError:
        raise PlannerInputError(f"{where} must be {allowed}, not {value!r}") from None
    if not low <= number <= high:
        raise PlannerInputError(f"{where} must be {allowed}, not {number:,}")
    return number


def _parse_average(value: Any, where: str) -> str:
    """Kept as text: 2.82 must stay exactly 282/100."""
    text = str(value).strip().lower()
    if text == "auto":
        return text
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1.0 <= number <= 16.0:
        raise PlannerInputError(f"{where} must be auto or a number of bits between 1 and 16, not {value!r}")
    return text
