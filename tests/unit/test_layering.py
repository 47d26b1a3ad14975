"""Keeps the import drawing of the package docstring true: every import of every package file, parsed, not executed.

    cli, server -> text, engine -> scheduler -> speculate, sampling -> model -> memory -> agens_kernels, agens_quant
    core, errors at the bottom; agens_planner: standard library and numpy; agens_kernels: torch, triton, numpy
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_DIRS = {
    "agens_engine": ROOT,
    "agens_quant": ROOT / "quant",
    "agens_planner": ROOT / "planner",
    "agens_kernels": ROOT / "kernels",
}
OURS = frozenset(SOURCE_DIRS)

# Rooms that each room of agens_engine may import directly. core and errors are open to all, a room to itself.
_TOP = {
    "settings", "model_files", "text", "engine", "step", "scheduler", "sequence", "speculate", "sampling", "model",
    "sessions", "memory", "planning", "probe", "layerwise", "engine_build", "evaluation", "quantize", "bench",
    "startup",
}  # fmt: skip
_PACKED = {"agens_kernels", "agens_quant", "agens_planner"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "core": set(),
    "settings": {"agens_planner"},
    "model_files": {"settings"},  # the files of a model folder beside its weights
    "memory": {"agens_kernels", "agens_quant", "agens_planner"},
    "model": {"memory", "agens_kernels", "agens_quant", "agens_planner"},
    "sampling": {"model", "memory", "agens_kernels"},
    "speculate": {"sampling", "model", "memory", "agens_kernels"},
    "sequence": {"speculate", "sampling", "model", "memory"},
    "scheduler": {"sequence", "speculate", "sampling", "model", "memory"},
    "sessions": {"sequence", "speculate", "sampling", "model", "memory"},
    "step": {"scheduler", "sequence", "speculate", "sampling", "model", "memory"},
    "text": {"settings"},
    "layerwise": {"model", "memory", "agens_kernels"},  # one layer in memory at a time
    "engine_build": {"model", "agens_quant"},
    "evaluation": {"text", "layerwise", "engine_build", "model", "agens_quant"},
    "quantize": {"text", "layerwise", "engine_build", "model", "agens_quant"},
    "bench": set(),
    "probe": {"agens_planner"},
    "planning": {"settings", "model_files", "probe", "agens_planner"},
    "engine": {"step", "scheduler", "sequence", "sessions", "speculate", "sampling", "model", "memory"},
    "startup": {"engine", "sessions", "speculate", "model", "memory", "model_files", "planning", "settings"},
    "server": _TOP | _PACKED,
    "commands": _TOP | _PACKED | {"server"},
    "cli": _TOP | _PACKED | {"server", "commands"},
    "__init__": set(),
    "__main__": {"cli"},
}
BOTTOM = {"core", "errors"}
# What the packages below the engine may import besides themselves and the standard library.
EXTERNAL: dict[str, set[str]] = {
    "agens_planner": {"numpy"},
    "agens_kernels": {"torch", "triton", "numpy"},
    "agens_quant": {"torch", "numpy", "safetensors"},
}
# `__init__.py` files stay light, so that `agens --help` does not wait for torch.
HEAVY = {"torch", "triton", "numpy", "aiohttp", "tokenizers", "jinja2", "transformers", "huggingface_hub"}


def _module_name(package: str, file: Path) -> str:
    parts = list(file.relative_to(SOURCE_DIRS[package]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: dict[str, Path] = {
    _module_name(package, file): file
    for package, source in SOURCE_DIRS.items()
    for file in sorted((source / package).rglob("*.py"))
}


def imported_modules(module: str, tree: ast.AST, *, is_package: bool, known: Iterable[str]) -> set[str]:
    """Absolute names a module imports, also inside functions; `from a import b` is a.b where that is a module."""
    known = set(known)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = module.split(".")
                home = home[: len(home) - node.level + (1 if is_package else 0)]
                base = ".".join([*home, *([base] if base else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & known
            found.update(submodules)
            if len(submodules) < len(node.names):
                found.add(base)
    return found


def _imports_of(module: str) -> set[str]:
    file = MODULES[module]
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    return imported_modules(module, tree, is_package=file.name == "__init__.py", known=MODULES)


IMPORTS = {module: _imports_of(module) for module in MODULES}


def room(module: str) -> str:
    """The room of a module: agens_engine.model.kda -> model; agens_quant.pack -> agens_quant."""
    package, *rest = module.split(".")
    if package != "agens_engine":
        return package
    return rest[0] if rest else "__init__"


def violation(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`, or None."""
    home, there = room(module), imported.split(".")[0]
    if there in OURS:
        target = room(imported)
        if home == target:
            return None
        if home in EXTERNAL:
            return None if target in EXTERNAL[home] else f"{module} imports {imported}: {home} stands below {target}"
        if target in BOTTOM and home not in BOTTOM:
            return None
        if target == "__init__" or (home == "core" and target == "errors"):
            return None
        if home not in ALLOWED:
            return f"{module}: room {home} is not in the drawing; add it to ALLOWED with the rooms below it"
        return None if target in ALLOWED[home] else f"{module} imports {imported}: {home} may not import {target}"
    if home in EXTERNAL and there not in EXTERNAL[home] and there not in sys.stdlib_module_names:
        return f"{module} imports {imported}: {home} may import {sorted(EXTERNAL[home])} and the standard library"
    return None


def test_every_package_was_found() -> None:
    assert {m.split(".")[0] for m in MODULES} == OURS
    assert "agens_engine.core" in MODULES
    assert "agens_engine.errors" in IMPORTS["agens_engine.core"]


def test_imports_follow_the_drawing() -> None:
    arrows = [(module, imported) for module, imports in IMPORTS.items() for imported in sorted(imports)]
    broken = [message for module, imported in arrows if (message := violation(module, imported))]
    assert not broken, "\n".join(broken)


def test_the_drawing_itself_has_no_cycle() -> None:
    edges = {home: (targets & set(ALLOWED)) | (BOTTOM - {home, "core"}) for home, targets in ALLOWED.items()}
    edges["errors"] = set()
    TopologicalSorter(edges).prepare()


def test_modules_have_no_import_cycle() -> None:
    graph = {module: {i for i in imports if i in MODULES and i != module} for module, imports in IMPORTS.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail("import cycle: " + " -> ".join(e.args[1]))


def test_init_files_import_nothing_heavy() -> None:
    heavy = [
        f"{module} imports {imported}"
        for module, imports in IMPORTS.items()
        if MODULES[module].name == "__init__.py"
        for imported in imports
        if imported.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_room_folders_are_no_packages() -> None:
    stray = [name for name in ("kernels", "quant", "planner") if (ROOT / name / "__init__.py").exists()]
    assert not stray, f"{stray}/__init__.py would shadow published packages of that name"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("agens_engine.text.stops", "agens_engine.engine"),
        ("agens_engine.text.stops", "agens_engine.model.config"),
        ("agens_engine.model.kda", "agens_engine.scheduler"),
        ("agens_engine.memory.state", "agens_engine.model.kda"),
        ("agens_engine.engine", "agens_engine.server.app"),
        ("agens_engine.errors", "agens_engine.core"),
        ("agens_engine.core", "agens_engine.model.config"),
        ("agens_engine.unheard_of", "agens_engine.engine"),
        ("agens_quant.pack", "agens_engine.errors"),
        ("agens_planner.plan", "torch"),
        ("agens_planner.plan", "agens_quant.pack"),
        ("agens_kernels.kda", "safetensors"),
    ],
)
def test_a_wrong_import_is_caught(module: str, imported: str) -> None:
    assert violation(module, imported)


def test_relative_and_nested_imports_are_seen() -> None:
    source = "from . import b\nfrom ..errors import X\ndef f():\n    import torch.nn\n"
    found = imported_modules("p.room.a", ast.parse(source), is_package=False, known={"p.room.b", "p.errors"})
    assert found == {"p.room.b", "p.errors", "torch.nn"}
    found = imported_modules("p.room", ast.parse("from .a import f"), is_package=True, known={"p.room.a"})
    assert found == {"p.room.a"}
