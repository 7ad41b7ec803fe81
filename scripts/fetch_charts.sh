#!/usr/bin/env bash
# Puts the page's chart library where the page and the wheel find it. Without it the page shows tables.
#
# Law: a file under its final name is whole and has the pinned sum; nothing of the package is run.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec </dev/null

case "${1-}" in
  '') ;;
  -h|--help) echo "usage: scripts/fetch_charts.sh   (takes uPlot from the npm registry into polykv_proxy/ui/static/vendor)"; exit 0 ;;
  *) step="reading the options"; fail "unknown option: $1" ;;
esac

version=1.6.32
sum=2883159c6ebccefbb95d751b0b82d010f9e1c0ec41b8bc96d401eda66e882935c89a46cb824332fa369b8cb8122cc6ac36e186cd09bf7a9ded3a4c93c6989023
target=$root/polykv_proxy/ui/static/vendor/uplot
package=$cache/npm/uplot-$version.tgz

[ "$(cat "$target/VERSION" 2>/dev/null)" != "$version" ] || exit 0
mkdir -p "$cache/npm" "$(dirname "$target")"
hold_lock 9 "$cache/npm/.lock" fetch

sum_of() { "$python" -c 'import hashlib, sys; print(hashlib.sha512(open(sys.argv[1], "rb").read()).hexdigest())' "$1"; }
need_python
if [ ! -e "$package" ] || [ "$(sum_of "$package")" != "$sum" ]; then
  step="downloading uPlot $version"; say "$step"
  ensure_npm
  work=$(mktemp -d "$cache/npm/.work.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  npm pack --silent --cache "$cache/npm/cache" --pack-destination "$work" "uplot@$version" >/dev/null \
    || fail "npm could not get it; is the npm registry reachable? Run the same command again"
  found=$(sum_of "$work"/uplot-*.tgz)
  [ "$found" = "$sum" ] || fail "it has another sum than the pinned one: $found"
  mv "$work"/uplot-*.tgz "$package"
fi

step="unpacking uPlot"
rm -rf "$target" "$target.part"
mkdir -p "$target.part"
tar -xzf "$package" -C "$target.part" --strip-components=1 package/LICENSE package/dist/uPlot.esm.js package/dist/uPlot.min.css
mv "$target.part"/dist/* "$target.part"; rmdir "$target.part/dist"
echo "$version" >"$target.part/VERSION"
mv "$target.part" "$target"
