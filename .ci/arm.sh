#!/usr/bin/env bash
# `make test-arm`: the native module for 64-bit ARM, compiled here and run by an emulator: the driver on
# CPUs of each instruction-set level, tests/kernels at all levels, golden files. .ci/arm.sh PYTHON
# [pytest arguments]; everything it makes lies in build/arm, a copy of the tree among it.
#
# The emulator orders memory as this machine does: a missing barrier does not show here. `make sanitize`
# looks for those.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
PATH="$(dirname "$python"):$PATH" # cmake and ninja may come from the virtual environment
out=$PWD/build/arm
tree=$out/tree
root=$out/root
cross=aarch64-linux-gnu

while read -r tool package; do
  command -v "$tool" >/dev/null || {
    echo "make test-arm: $tool is missing; on Debian or Ubuntu: apt install $package" >&2
    exit 1
  }
done <<END
$cross-g++ g++-$cross
qemu-aarch64-static qemu-user-static
mmdebstrap mmdebstrap
cmake cmake
END

say() { echo "=== $(printf '%(%T)T') $*"; }

say "building for $cross"
mkdir -p "$out/native"
{ cmake -S . -B "$out/native" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=$cross-g++ -DEMBEDLM_DRIVER=ON -DSKBUILD=ON &&
    cmake --build "$out/native" -j "$(nproc)"
} >"$out/native/log" 2>&1 || {
  tail -n 50 "$out/native/log" >&2
  exit 1
}
"$python" tests/native/instructions.py "$out/native/_native.so" --objdump $cross-objdump

# One CPU for each level, and the levels that it must offer (levels.hpp).
while read -r cpu levels; do
  say "driver on $cpu"
  found=$(qemu-aarch64-static -cpu "$cpu" -L /usr/$cross "$out/native/driver" 2 </dev/null |
    tee /dev/stderr | sed 's/driver: level \([0-9]*\),.*/\1/' | xargs)
  [ "$found" = "$levels" ] || {
    echo "make test-arm: $cpu: expected the levels $levels, found $found" >&2
    exit 1
  }
done <<END
cortex-a53 0 4
neoverse-n1 0 4 5
max 0 4 5 6
END

# An ARM Python: Debian's, unpacked, not installed; and wheels for it.
if [ ! -e "$root/done" ]; then
  say "fetching a Python for ARM"
  rm -rf "$root"
  mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3,libstdc++6,zlib1g \
    bookworm "$root"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    --target "$root/site" -r .ci/arm-python.txt
  touch "$root/done"
fi

rm -rf "$tree" "$out/bin" && mkdir -p "$tree" "$out/bin"
cp -r sdk kernels quant loaders models tests pyproject.toml "$tree/"
cp "$out/native/_native.so" "$tree/kernels/cpu/"
# What tests start, and this script: programs for ARM, or tools that make and read such programs.
ln -s "$(command -v $cross-gcc)" "$out/bin/cc"
ln -s "$(command -v $cross-objdump)" "$out/bin/objdump"
cat >"$out/bin/python" <<END
#!/bin/sh
exec qemu-aarch64-static -cpu max -L $root -0 $out/bin/python $root/usr/bin/python3.11 "\$@"
END
chmod +x "$out/bin/python"
export PATH="$out/bin:$PATH" PYTHONHOME=/usr PYTHONPATH="$tree:$root/site" OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE=1

say "tests/kernels at all levels, golden files"
cd "$tree"
# Left out: a comparison of torch code with libgguf, of which there is no wheel for ARM; and a test of advice
# about memory, which the emulator does not pass on.
"$out/bin/python" -m pytest --timeout 3000 -q -m "not slow" tests/kernels \
  --ignore tests/kernels/test_reference.py tests/accuracy/test_goldens.py \
  --deselect tests/kernels/test_weight_file.py::test_the_weight_that_came_next_the_last_time_is_asked_for "$@"
