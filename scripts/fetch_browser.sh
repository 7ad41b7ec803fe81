#!/usr/bin/env bash
# Finds or fetches a Chromium for the tests of the page, and prints its path.
#
# Law: the system is not changed and no root is needed: Debian's packages are unpacked in the cache folder. What is printed has run.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec </dev/null

usage() {
  cat <<'USAGE'
usage: scripts/fetch_browser.sh

Prints the path of the first of these that runs: $POLYKV_CHROMIUM, a `chromium` on the path, Debian's package chromium unpacked in
${POLYKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polykv}/chromium (about 120 MB to fetch, 400 MB on the disk; needs apt-get and dpkg-deb).
USAGE
}

step="reading the options"
case "${1-}" in
  '') ;;
  -h|--help) usage; exit 0 ;;
  *) usage >&2; fail "unknown option: $1" ;;
esac

runs() { [ -x "$1" ] && "$1" --version >/dev/null 2>&1; }

if [ -n "${POLYKV_CHROMIUM-}" ]; then
  runs "$POLYKV_CHROMIUM" || fail "POLYKV_CHROMIUM is $POLYKV_CHROMIUM, which does not run"
  echo "$POLYKV_CHROMIUM"; exit 0
fi
installed=$(command -v chromium || true)
if runs "$installed"; then echo "$installed"; exit 0; fi

folder=$cache/chromium
if runs "$folder/chromium"; then echo "$folder/chromium"; exit 0; fi
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || fail "there is no $tool here: install Chromium, or set POLYKV_CHROMIUM to one"
done
hold_lock 9 "$cache/.chromium.lock" fetch
if runs "$folder/chromium"; then echo "$folder/chromium"; exit 0; fi

work=$cache/.chromium.work
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/chromium/root"
trap 'rm -rf "$work"' EXIT
apt=(apt-get -qq -y -o Debug::NoLocking=1 -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root)
step="fetching Debian's chromium"; say "$step"
"${apt[@]}" update >&2 || fail "apt-get update failed; are Debian's packages reachable? Run the same command again"
"${apt[@]}" --no-install-recommends --download-only install chromium >&2 || fail "apt-get could not get the package chromium"

step="unpacking chromium"
for package in "$work"/archives/*.deb; do dpkg-deb -x "$package" "$work/chromium/root"; done
cat >"$work/chromium/chromium" <<'START'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
for lib in "$here"/root/usr/lib/*-linux-gnu; do LD_LIBRARY_PATH=$lib:$lib/pulseaudio${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; done
export LD_LIBRARY_PATH
exec "$here/root/usr/lib/chromium/chromium" "$@"
START
chmod +x "$work/chromium/chromium"
"$work/chromium/chromium" --version >/dev/null || fail "what was unpacked does not run; install Chromium, or set POLYKV_CHROMIUM to one"
rm -rf "$folder"
mv "$work/chromium" "$folder"
echo "$folder/chromium"
