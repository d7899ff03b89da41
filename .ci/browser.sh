#!/usr/bin/env bash
# browser.sh: a Chromium for tests/serving/page. Installs Debian's package where it may; elsewhere it says what to do,
# and the tests fail.
set -euo pipefail
for name in "${EMBEDLM_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then
    exit 0
  fi
done
install() {
  echo "embedlm: installing Chromium for tests/serving/page"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null
}
export DEBIAN_FRONTEND=noninteractive
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && install; then
  exit 0
fi
echo "embedlm: tests/serving/page need Chromium and fail without it. Install it (Debian: sudo apt install chromium), run" >&2
echo "embedlm: .venv/bin/python -m playwright install chromium, or set EMBEDLM_CHROMIUM to the path of one." >&2
