#!/usr/bin/env bash
# try_wheel.sh PYTHON WHEEL MODEL: the wheel with everything it depends on, from the package index, in a new
# environment that sees nothing else: no checkout, no compiler, no variables. The native module loads, and
# MODEL answers.
set -euo pipefail
python=$(command -v "$1")
wheel=$(realpath "$2")
model=$(realpath "$3")
constraints=$(realpath "$(dirname "$0")/constraints-cpu.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/home"
cd "$folder/home"
"$python" -m venv "$folder/env"
# shellcheck disable=SC2086  # several flags
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_FLAGS:-} -c "$constraints" "$wheel"
alone() { env -i HOME="$folder/home" PATH="$folder/env/bin" "$@"; }
alone embedlm doctor
alone python -c "import embedlm, sdk; assert embedlm.LLM is sdk.LLM"
alone embedlm run "$model" --raw --prompt "Hello" --max-tokens 8
