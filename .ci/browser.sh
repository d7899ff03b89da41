#!/usr/bin/env bash
# browser.sh: what tests of windows and pages need: Chromium (tests/serving/page) and a display that nobody sees, Xvfb
# (tests/docs). Installs Debian's packages where it may; elsewhere it says what to do, and the tests fail.
set -euo pipefail
missing=()
for name in "${EMBEDLM_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable ""; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then
    break
  fi
done
[ -n "$name" ] || missing+=(chromium fonts-liberation)
command -v Xvfb >/dev/null || missing+=(xvfb)
[ ${#missing[@]} -gt 0 ] || exit 0
install() {
  echo "embedlm: installing for tests/serving/page and tests/docs: ${missing[*]}"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
export DEBIAN_FRONTEND=noninteractive
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && install; then
  exit 0
fi
echo "embedlm: tests/serving/page and tests/docs fail without: ${missing[*]}. Install it (Debian: sudo apt install" >&2
echo "embedlm: ${missing[*]}). For Chromium also: .venv/bin/python -m playwright install chromium, or set" >&2
echo "embedlm: EMBEDLM_CHROMIUM to the path of one." >&2
