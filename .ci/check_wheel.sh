#!/usr/bin/env bash
# check_wheel.sh FOLDER: the one wheel in it is for every Python and has the native module.
set -euo pipefail
wheel=$(ls "$1"/embedlm-*.whl)
[[ "$wheel" == *-py3-none-*linux*_x86_64.whl ]] || { echo "$wheel: expected py3-none-*linux*_x86_64" >&2; exit 1; }
names=$(python3 -m zipfile -l "$wheel")
for name in sdk/kernels/cpu/_native.so sdk/quant/expected_loss.json sdk/server/page/index.html embedlm/__init__.py; do
  grep -q "^$name " <<< "$names" || { echo "$wheel: $name is not in it" >&2; exit 1; }
done
echo "$wheel: fine"
