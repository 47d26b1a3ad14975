#!/usr/bin/env bash
# Lint, type check and test. Creates .venv on first use. Arguments go to pytest: scripts/test.sh tests/unit -k kda
# Slow tests: scripts/test.sh -m slow      device tests: scripts/test.sh -m gpu
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/ensure_env.sh dev

# Two workers on two cores: more threads inside each would only make them fight.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== ruff"
.venv/bin/ruff check .
echo "== mypy"
.venv/bin/mypy
echo "== pytest"
exec .venv/bin/python -m pytest -n "${AGENS_TEST_WORKERS:-2}" --dist loadfile -q "$@"
