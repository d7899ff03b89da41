#!/usr/bin/env bash
# Everything that needs a GPU, from a bare checkout: nothing is installed, nothing is fetched.
#   .ci/gpu.sh [tests|bench|tune ...]     all three by default; each within ten minutes
#   tests   kernels and engines against references, in a process for each core; the card's limits
#   bench   embedlm bench gpu: bench.md for docs/benchmarks.md, with predictions; bench.json
#   tune    embedlm tune: tuned/<card>.json for kernels/tuned
# PARTS names them too (`make gpu PARTS=bench`). PYTHON is the interpreter that has torch, triton,
# transformers, safetensors and numpy, and for the tests pytest. Results go to OUT as they come, so
# that a call which ends early keeps what it has. A part that fails does not keep the next from
# running.
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

ended() { # name, seconds, exit code
  case $3 in
    0) ;;
    124 | 137) failed+=("$1 (not done after $2 s)") ;;
    *) failed+=("$1 (exit code $3)") ;;
  esac
}

step() { # name, seconds, command...
  local name=$1 seconds=$2
  shift 2
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" 2>&1 | tee "$OUT/$name.txt"
  code=${PIPESTATUS[0]} # for the caller
  ended "$name" "$seconds" "$code"
}

# Compiling takes most of the time: a process for each core, each with a context on the card, runs
# its share of the tests (tests/card/conftest.py) and stops by itself when the time is over.
run_tests() {
  if ! has pytest; then
    echo "== tests: pytest is not installed, nothing was tested"
    failed+=("tests (no pytest)")
    return
  fi
  local cores workers i pids=()
  cores=$(env -u OMP_NUM_THREADS nproc) # which nproc would take for the number
  workers=$((cores < 12 ? cores : 12))
  echo "== tests: $workers processes of $PYTHON -m pytest tests/card"
  for ((i = 0; i < workers; i++)); do
    CARD_TESTS_SHARE=$i/$workers CARD_TESTS_SECONDS=440 timeout -k 10 480 \
      "$PYTHON" -m pytest -q -m gpu --durations=3 -p no:cacheprovider tests/card \
      >"$OUT/tests-$i.txt" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < workers; i++)); do
    wait "${pids[i]}"
    ended "tests-$i" 480 $?
    echo "-- tests-$i: $(tail -n 1 "$OUT/tests-$i.txt")"
    grep -E '^(FAILED|ERROR)' "$OUT/tests-$i.txt"
  done
}

# A kernel that makes the card unusable ends the process: the next one leaves that entry out.
run_tune() {
  local end=$((SECONDS + 500)) attempt
  for attempt in 1 2 3 4; do
    local left=$((end - SECONDS))
    [ "$left" -ge 60 ] || return
    step "tune-$attempt" "$left" "$PYTHON" -m sdk tune --seconds $((left - 40)) --out "$OUT/tuned"
    [ "$code" -ne 0 ] || return
  done
}

for part in "${parts[@]}"; do
  case $part in
    tests)
      run_tests
      step limits 60 "$PYTHON" -m sdk bench gpu --rows limits --seconds 50 \
        --json "$OUT/limits.json" --log "$OUT/limits.log" ;;
    bench)
      step bench 575 "$PYTHON" -m sdk bench gpu --json "$OUT/bench.json" \
        --markdown "$OUT/bench.md" --log "$OUT/bench.log" ;;
    tune) run_tune ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  printf '== failed: %s\n' "${failed[@]}"
  exit 1
fi
