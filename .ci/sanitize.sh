#!/usr/bin/env bash
# `make sanitize`: the native kernels under the address, undefined-behaviour, leak and thread
# sanitizers and valgrind. .ci/sanitize.sh PYTHON [pytest arguments]; everything it makes lies in
# build/sanitize, a copy of the tree with the sanitized library in it among them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
PATH="$(dirname "$python"):$PATH" # cmake and ninja may come from the virtual environment
for tool in cmake c++; do
  command -v "$tool" >/dev/null || {
    echo "make sanitize: $tool is missing (cmake: $python -m pip install cmake)" >&2
    exit 1
  }
done
out=$PWD/build/sanitize
tree=$out/tree
stop="-fno-sanitize-recover=all -fno-omit-frame-pointer"

say() { echo "=== $(printf '%(%T)T') $*"; }

# build <folder> <source> <target> <flags> [cmake arguments]: quiet unless it fails. -w: the warnings
# of an instrumented build, 500 lines about loops not unrolled, say nothing about the sources.
build() {
  local folder=$out/$1 source=$2 target=$3 flags="-O1 -g -w $4"
  shift 4
  mkdir -p "$folder"
  { cmake -S "$source" -B "$folder" -DCMAKE_BUILD_TYPE=None -DEMBEDLM_DRIVER=ON \
    -DCMAKE_CXX_FLAGS="$flags" "$@" && cmake --build "$folder" -j "$(nproc)" --target "$target"
  } >"$folder/log" 2>&1 || {
    tail -n 50 "$folder/log" >&2
    exit 1
  }
}

say "building with -fsanitize=address,undefined"
# SKBUILD: the library is not copied into the checkout, which keeps its own
build address . all "-fsanitize=address,undefined $stop" -DSKBUILD=ON
rm -rf "$tree" && mkdir -p "$tree"
cp -r sdk kernels quant loaders models tests pyproject.toml "$tree/"
cp "$out/address/_native.so" "$tree/kernels/cpu/"

say "building with -fsanitize=thread"  # threads are not a matter of levels: the smallest build
build thread . driver "-fsanitize=thread" -DHAS_AVX2=OFF

say "driver under the address, undefined-behaviour and leak sanitizers"
ASAN_OPTIONS=detect_leaks=1 "$out/address/driver" 50

say "driver under the thread sanitizer"
"$out/thread/driver" 10

if command -v valgrind >/dev/null; then
  say "driver under valgrind, which has no AVX-512: at the levels below it"
  build plain . driver "" -DHAS_AVX_VNNI=OFF -DHAS_AVX512_VNNI=OFF
  valgrind --quiet --error-exitcode=1 --leak-check=full "$out/plain/driver" 5
else
  say "valgrind is not installed: left out"
fi

say "tests/kernels on the sanitized library"
# The interpreter is not sanitized, so the runtimes come first; what torch never frees is no leak.
preload=
for name in asan ubsan stdc++; do
  preload+=" $(c++ -print-file-name=lib$name.so)"
done
# Two tests look at the code of the released library, not at what it computes.
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
  "$python" "$tree/tests/native/run_tests.py" "$tree" tests/kernels -q --capture=sys \
  --deselect tests/kernels/test_disassembly.py \
  --deselect tests/kernels/test_cpu_engine.py::test_the_baseline_holds_no_wide_instructions "$@"
say "clean"
