#!/usr/bin/env bash
# Create .venv in the repository on first use; afterwards return at once. Prints what it does; safe to run twice at once.
#
#   scripts/ensure_env.sh [dev]     dev adds the test tools
#
# Environment:
#   PYTHON             the interpreter to build from (default: the newest python3 found, 3.11 or later)
#   AGENS_TORCH_INDEX  an extra package index that offers the torch build you want, for example a CPU-only one.
#                      Without it pip's own configuration decides; the regular Linux build runs on CPUs as well,
#                      it is only larger.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
extra=${1:-}
case "$extra" in
  "" | dev) ;;
  *) echo "ensure_env.sh: unknown argument '$extra'; use none or 'dev'" >&2; exit 2 ;;
esac

say() { echo "[env] $*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    if [ -n "${PYTHON:-}" ] && [ "$candidate" = "$PYTHON" ]; then
      echo "[env] PYTHON=$PYTHON does not run, or is older than 3.11, or lacks the venv module" >&2
      return 1
    fi
  done
  echo "[env] no Python 3.11 or later with the venv module found; install one or set PYTHON=/path/to/python3" >&2
  return 1
}

# A pyproject.toml that changed makes the stamp stale. 'dev' covers plain use, not the other way round.
stamp_of() { echo "$(cksum < "$root/pyproject.toml" | tr ' ' '-') ${AGENS_TORCH_INDEX:-} $1"; }
fresh() {
  [ -x "$venv/bin/python" ] && [ -f "$venv/.agens-stamp" ] || return 1
  local have
  have=$(cat "$venv/.agens-stamp")
  [ "$have" = "$(stamp_of "$extra")" ] || [ "$have" = "$(stamp_of dev)" ]
}

fresh && exit 0

# Two scripts started together must not both install.
if command -v flock >/dev/null 2>&1; then
  exec 9<"$root/pyproject.toml"
  flock -n 9 || { say "another script is preparing .venv; waiting for it"; flock 9; }
  fresh && exit 0
fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  python=$(find_python)
  say "creating .venv with $("$python" --version 2>&1)"
  "$python" -m venv --clear "$venv"
fi

# Keep an environment that was made with dev whole when it is refreshed for plain use.
if [ -f "$venv/.agens-stamp" ] && [[ $(cat "$venv/.agens-stamp") == *" dev" ]]; then
  extra=dev
fi

torch_pin=$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' "$root/pyproject.toml" | head -n 1)
index=()
[ -z "${AGENS_TORCH_INDEX:-}" ] || index=(--extra-index-url "$AGENS_TORCH_INDEX")
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  say "NVIDIA GPU found: installing $torch_pin (minutes on first use)"
elif [ ${#index[@]} -gt 0 ]; then
  say "no NVIDIA GPU found: installing $torch_pin, preferring the build of AGENS_TORCH_INDEX (minutes on first use)"
else
  say "no NVIDIA GPU found: installing $torch_pin (minutes on first use; it runs on the CPU as well;" \
    "AGENS_TORCH_INDEX can point to an index with a smaller CPU-only build)"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install --quiet "${index[@]+"${index[@]}"}" "$torch_pin"
say "installing agens-engine${extra:+ with the $extra tools}"
"$venv/bin/python" -m pip install --quiet "${index[@]+"${index[@]}"}" --editable "$root${extra:+[$extra]}"
stamp_of "$extra" > "$venv/.agens-stamp"
say "ready: .venv"
