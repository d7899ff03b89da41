#!/usr/bin/env bash
# Everything that needs a GPU, from a bare checkout: nothing is installed, nothing is fetched.
#   .ci/gpu.sh [tests|bench|tune ...]     all three by default, each within ten minutes
# PYTHON names the interpreter that has torch, triton, transformers, safetensors and numpy (pytest for
# the tests); results go to OUT. A step that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
failed=()

step() { # name, seconds, command...
  local name=$1 seconds=$2
  shift 2
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" 2>&1 | tee "$OUT/$name.txt"
  local code=${PIPESTATUS[0]}
  if [ "$code" -ne 0 ]; then failed+=("$name (exit code $code)"); fi
}

for name in "${@:-tests bench tune}"; do
  for part in $name; do
    case $part in
      tests)
        if "$PYTHON" -c 'import pytest' 2>/dev/null; then
          step tests 570 "$PYTHON" -m pytest -q -m gpu --durations=10 tests/card
        else
          echo "== tests: pytest is not installed, nothing was tested"
          failed+=("tests (no pytest)")
        fi ;;
      bench)
        step bench 570 "$PYTHON" -m sdk bench gpu --json "$OUT/bench.json" \
          --markdown "$OUT/bench.md" --log "$OUT/bench.log" ;;
      tune)
        step tune 590 "$PYTHON" -m sdk tune --seconds 540 --out "$OUT/tuned" ;;
      *)
        echo "gpu.sh: expected tests, bench or tune, found $part" >&2
        exit 2 ;;
    esac
  done
done
if [ ${#failed[@]} -gt 0 ]; then
  printf '== failed: %s\n' "${failed[@]}"
  exit 1
fi
