"""`agens doctor`: what this machine has and whether a model can run on it, for people and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import agens_engine
from agens_engine.errors import AgensError
from agens_engine.model_files import resolve_model

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "aiohttp", "huggingface_hub")


def run_doctor(model: str, json_out: bool) -> None:
    """Prints the report; raises AgensError when something is missing that running needs."""
    report = examine(model)
    if json_out:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_report(report)
    if report["problems"]:
        raise AgensError("; ".join(report["problems"]))


def examine(model: str) -> dict[str, Any]:
    problems: list[str] = []
    versions = {name: _version(name) for name in _PACKAGES}
    problems += [f"{name} is not installed" for name, version in versions.items() if version is None and _needed(name)]
    found = _model_facts(model)
    if "error" in found:
        problems.append(str(found["error"]))
    return {
        "agens": agens_engine.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count() or 1, "usable_cores": _usable_cores()},
        "memory": _memory_facts(),
        "gpus": _gpu_facts(problems) if versions["torch"] else [],
        "model": {"name": model, **found},
        "problems": problems,
    }


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needed(name: str) -> bool:
    """Triton has no builds outside Linux; without it the kernels' plain references run."""
    return name != "triton" or sys.platform == "linux"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine()


def _memory_facts() -> dict[str, int]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available}


def _gpu_facts(problems: list[str]) -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gpu: dict[str, Any] = {"name": facts.name, "compute_capability": f"{facts.major}.{facts.minor}"}
        try:
            gpu["free_bytes"], gpu["total_bytes"] = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            problems.append(f"GPU {index} ({facts.name}) cannot be used: {error}")
        gpus.append(gpu)
    return gpus


def _model_facts(model: str) -> dict[str, Any]:
    try:
        directory = resolve_model(model)
    except AgensError as error:
        return {"error": str(error)}
    weights = sorted(directory.glob("*.safetensors"))
    facts: dict[str, Any] = {"directory": str(directory), "weight_bytes": sum(file.stat().st_size for file in weights)}
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    missing += [] if weights else ["*.safetensors"]
    if missing:
        facts["error"] = f"{directory} lacks {', '.join(missing)}"
        return facts
    from agens_engine.model.checkpoint import open_checkpoint

    try:
        with open_checkpoint(directory) as checkpoint:
            facts["weights"] = [vars(row) for row in checkpoint.describe_formats()]
    except AgensError as error:
        facts["error"] = str(error)
    return facts


def _print_report(report: dict[str, Any]) -> None:
    memory = report["memory"]
    print(f"agens        {report['agens']} on Python {report['python']}, {report['platform']}")
    print("packages     " + ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items()))
    cpu = report["cpu"]
    print(f"cpu          {cpu['name']}, {cpu['usable_cores']} of {cpu['cores']} cores usable")
    print(f"memory       {_gib(memory['available_bytes'])} free of {_gib(memory['total_bytes'])}")
    for gpu in report["gpus"]:
        size = f"{_gib(gpu['free_bytes'])} free of {_gib(gpu['total_bytes'])}" if "total_bytes" in gpu else "unusable"
        print(f"gpu          {gpu['name']}, compute capability {gpu['compute_capability']}, {size}")
    if not report["gpus"]:
        print("gpu          none found; the engine runs on the CPU")
    model = report["model"]
    where = f"{model['directory']}, {_gib(model['weight_bytes'])} of weights" if "directory" in model else "not found"
    print(f"model        {model['name']}: {where}")
    for row in model.get("weights", ()):
        what = f"{row['kind']:<48} {row['num_tensors']:>5} × {row['format']:<24}"
        print(f"             {what} {row['nbytes']:>14,} bytes")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
