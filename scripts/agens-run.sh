#!/usr/bin/env bash
# Start the server: creates .venv on first use, then runs `agens serve` with the arguments given.
#   scripts/agens-run.sh                       the embedded nano model on a machine without a GPU
#   scripts/agens-run.sh --model DIR --port 8000
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/ensure_env.sh"
# exec: signals (Ctrl-C, SIGTERM) must reach the server itself for a graceful stop.
exec "$root/.venv/bin/agens" serve "$@"
