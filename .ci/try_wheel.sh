#!/usr/bin/env bash
# try_wheel.sh PYTHON FOLDER: the wheel in FOLDER in a new environment, outside of a checkout: the native
# module loads, and the demo model answers.
set -euo pipefail
wheel=$(realpath "$2"/embedlm-*.whl)
constraints=$(realpath "$(dirname "$0")/constraints-cpu.txt")
python=$(command -v "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$python" -m venv env
# shellcheck disable=SC2086  # several flags
env/bin/python -m pip install --quiet --disable-pip-version-check ${PIP_FLAGS:-} -c "$constraints" "$wheel"
env/bin/embedlm doctor --only native
env/bin/embedlm fetch-demo
env/bin/python -c "import embedlm, sdk; assert embedlm.LLM is sdk.LLM"
env/bin/embedlm run --prompt "Say hello." --max-tokens 8
