#!/usr/bin/env bash
# Everything that needs a GPU, from a bare checkout: nothing is installed, nothing is fetched.
#   .ci/gpu.sh [tests|bench|tune ...]     all three by default, in 25 minutes; each alone within ten
# PARTS names them too (`make gpu PARTS=bench`). PYTHON is the interpreter that has torch, triton,
# transformers, safetensors and numpy, for the tests pytest, and pytest-xdist if they are to run side
# by side. Results go to OUT. A part that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
read -ra parts <<<"${*:-${PARTS:-tests bench tune}}"
for part in "${parts[@]}"; do
  case $part in
    tests | bench | tune) ;;
    *)
      echo "gpu.sh: expected tests, bench or tune, found $part" >&2
      exit 2 ;;
  esac
done
mkdir -p "$OUT"
# Shared by all parts and processes: what one has compiled, the others find. A cache made on another
# machine would not be used: Triton's keys hold its own shared library, which each Python has another
# of, and the files in it name each other by absolute paths.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton}
export PYTHONUNBUFFERED=1
failed=()

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

step() { # name, seconds, command...
  local name=$1 seconds=$2
  shift 2
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" 2>&1 | tee "$OUT/$name.txt"
  local code=${PIPESTATUS[0]}
  case $code in
    0) ;;
    124 | 137) failed+=("$name (not done after $seconds s)") ;;
    *) failed+=("$name (exit code $code)") ;;
  esac
}

run_tests() {
  if ! has pytest; then
    echo "== tests: pytest is not installed, nothing was tested"
    failed+=("tests (no pytest)")
    return
  fi
  # Compiling takes most of the time: a process for each core, each with a context on the card.
  local cores workers options=()
  cores=$(env -u OMP_NUM_THREADS nproc) # which nproc would take for the number
  workers=$((cores < 12 ? cores : 12))
  if has xdist && [ "$workers" -gt 1 ]; then
    options=(-n "$workers" --dist worksteal)
  else
    echo "== tests: one after another; pytest-xdist would run them side by side"
  fi
  step tests 480 "$PYTHON" -m pytest -q -m gpu --durations=10 "${options[@]}" tests/card
}

for part in "${parts[@]}"; do
  case $part in
    tests) run_tests ;;
    bench)
      step bench 575 "$PYTHON" -m sdk bench gpu --json "$OUT/bench.json" \
        --markdown "$OUT/bench.md" --log "$OUT/bench.log" ;;
    tune) step tune 420 "$PYTHON" -m sdk tune --seconds 380 --out "$OUT/tuned" ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  printf '== failed: %s\n' "${failed[@]}"
  exit 1
fi
