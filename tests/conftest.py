"""Shared test setup: hypothesis profiles, thread counts, the golden checkpoint's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

DATA_DIR = Path(__file__).parent / "data"

# deadline None: a first torch call or a busy machine must not fail a property. In CI the examples are fixed.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Workers share the cores; threads inside each would only compete.
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The tiny random checkpoint whose logits are stored beside it (tests/data/golden/README.md)."""
    return DATA_DIR / "golden"
