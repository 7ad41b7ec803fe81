#!/usr/bin/env bash
# Builds the patched engine and installs it as ./llamafile: get -> verify -> unpack -> apply series -> configure ->
# build llama-server -> install. Run `scripts/build_engine.sh --help` for the options.
#
# Law: everything heavy lives in the cache folder, addressed by content; the checkout holds only the result.
# One source tree serves patched and unpatched builds: switching rewrites only files whose content differs, so that a
# changed hook recompiles a handful of objects.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<'USAGE'
usage: scripts/build_engine.sh [options]

  --output FILE   where to install the engine (default ./llamafile, or ./llamafile-stock with --unpatched)
  --unpatched     build the unpatched twin, for comparisons
  --source DIR    use the llama.cpp tree in DIR (it is copied, never changed) instead of the pinned source
  --cuda          build with the CUDA backend      (needs the CUDA toolkit)
  --vulkan        build with the Vulkan backend    (needs the Vulkan SDK and glslc)
  --sanitize KIND address or thread: an instrumented build, for tests
  --jobs N        compile jobs (default: number of cores)
  --rebuild-times touch each hooked file in turn and print the seconds its rebuild takes
  --fetch         get and verify the pinned source, print where its archive is, and stop
  --print-key     print the cache key of this build and stop
  --clean         delete the build trees and engines in the cache (downloads and models stay), then stop
  -h, --help      this text

The cache is ${POLYKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polykv}. A first build takes about ten minutes on two cores, a
build that is in the cache takes seconds.
USAGE
}

output='' patched=1 source_dir='' cuda=OFF vulkan=OFF sanitize='' jobs=$(nproc 2>/dev/null || echo 2) print_key=0 times=0 fetch=0 clean=0
step="reading the options" wanted=''

ended() {
  local rc=$?
  [ -z "$wanted" ] || rm -rf "$wanted"
  [ $rc -eq 0 ] || [ -n "$said" ] || say "stopped while $step (exit $rc); run the same command again to go on from there"
}
trap ended EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

while [ $# -gt 0 ]; do
  case "$1" in
    --output)    output=${2:?--output needs a file}; shift ;;
    --unpatched) patched=0 ;;
    --source)    source_dir=$(cd "${2:?--source needs a folder}" && pwd) || fail "no such folder: $2"; shift ;;
    --cuda)      cuda=ON ;;
    --vulkan)    vulkan=ON ;;
    --sanitize)  sanitize=${2:?--sanitize needs address or thread}; shift ;;
    --jobs)      jobs=${2:?--jobs needs a number}; shift ;;
    --rebuild-times) times=1 ;;
    --print-key) print_key=1 ;;
    --fetch)     fetch=1 ;;
    --clean)     clean=1 ;;
    -h|--help)   usage; exit 0 ;;
    *)           usage >&2; fail "unknown option: $1" ;;
  esac
  shift
done
case "$sanitize" in ''|address|thread) ;; *) fail "--sanitize takes address or thread, not $sanitize" ;; esac
case "$jobs" in ''|*[!0-9]*|0) fail "--jobs takes a number of at least 1, not $jobs" ;; esac
if [ -z "$output" ]; then if [ $patched = 1 ]; then output=$root/llamafile; else output=$root/llamafile-stock; fi; fi
lock_file=$root/vendor/llamafile/source.lock

if [ $clean = 1 ]; then
  step="waiting for the build lock"
  hold_lock 9 "$cache/lock" build
  rm -rf "$cache/trees" "$cache/engines"
  say "removed build trees and engines under $cache"
  exit 0
fi

# --- get and verify ---------------------------------------------------------------------------------------------
sdist=''
get_source() {  # sets sdist
  local want package tmp
  step="waiting for the download lock"
  mkdir -p "$cache/downloads"
  hold_lock 7 "$cache/downloads/.lock" download
  want=$(grep -oE 'sha256:[0-9a-f]{64}' "$lock_file" | cut -d: -f2)
  package=$(grep -oE '^[A-Za-z0-9._-]+' "$lock_file")
  sdist=$cache/downloads/engine-source-$want.tar.gz
  [ ! -e "$sdist" ] || [ "$(sha256_of "$sdist")" != "$want" ] || { exec 7>&-; return 0; }
  ensure_tools pip
  step="downloading the engine source (73 MiB)"; say "$step"
  # the source of this one package: pip asks its build backend for metadata, whose tools (cmake) must come as wheels
  rm -rf "$cache"/downloads/get.*  # left by a run that was killed: we hold the lock
  tmp=$(mktemp -d "$cache/downloads/get.XXXXXX")
  "$cache/tools/bin/python" -m pip download -qq --disable-pip-version-check --no-deps --no-binary "$package" --require-hashes -r "$lock_file" -d "$tmp" </dev/null >&2 \
    || { rm -rf "$tmp"; fail "pip could not get it; is the package index reachable? (pip download --no-deps -r vendor/llamafile/source.lock shows more)"; }
  mv "$tmp"/*.tar.gz "$sdist"; rm -rf "$tmp"
  exec 7>&-
}
sha256_of() { { sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -d' ' -f1; }

if [ $fetch = 1 ]; then
  get_source; echo "$sdist"
  exit 0
fi

# --- what must be here ------------------------------------------------------------------------------------------
step="looking for the tools"
cxx=${CXX:-c++} cc=${CC:-cc}
command -v git >/dev/null || fail "git is missing; install it (Debian: apt-get install git)"
need_python
{ command -v "$cxx" && command -v "$cc"; } >/dev/null || fail "no C++ compiler ($cxx, $cc); install one (Debian: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"

# --- the key: source, patches, flags, compiler ------------------------------------------------------------------
step="computing the cache key"
hash_of() { sha256sum 2>/dev/null | cut -c1-20 || shasum -a 256 | cut -c1-20; }
flags=(
  -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG"
  "-DCMAKE_PROJECT_ggml_INCLUDE=$root/scripts/engine_flags.cmake"
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DGGML_CCACHE=OFF
  -DLLAMA_BUILD_NUMBER=5000 -DLLAMA_BUILD_COMMIT=polykv   # fixed: the model fingerprint must not follow our own git history
  "-DGGML_CUDA=$cuda" "-DGGML_VULKAN=$vulkan"
)
[ "$sanitize" = address ] && flags+=(-DLLAMA_SANITIZE_ADDRESS=ON -DGGML_SANITIZE_ADDRESS=ON)
[ "$sanitize" = thread ]  && flags+=(-DLLAMA_SANITIZE_THREAD=ON -DGGML_OPENMP=OFF)  # without the kernels: they would be 50 times slower
source_id() {
  if [ -n "$source_dir" ]; then (cd "$source_dir" && find . -type f -not -path './.git/*' -print0 | sort -z | xargs -0 sha256sum) else cat "$lock_file"; fi
}
cpu_id() { grep -m1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null || uname -m; }  # kernels are built for this processor
tree_key=$({ source_id; printf '%s\n' "${flags[@]//$root/}"; cat "$root/scripts/engine_flags.cmake"; "$cxx" --version; cpu_id; printf '%s' "${CFLAGS:+C $CFLAGS}" "${CXXFLAGS:+CXX $CXXFLAGS}" "${LDFLAGS:+LD $LDFLAGS}"; } | hash_of)
series=() patch_key=unpatched
if [ $patched = 1 ]; then
  mapfile -t series < <(grep -vE '^(#|[[:space:]]*$)' "$root/patches/series")
  for p in "${series[@]}"; do [ -f "$root/patches/$p" ] || fail "patches/series names $p, which patches/ does not hold"; done
  patch_key=$(cd "$root/patches" && { cat series; while read -r p; do [ -n "$p" ] && cat "$p"; done < <(grep -v '^#' series); find src -type f -print0 | sort -z | xargs -0 -r sha256sum; } | hash_of)
fi
key=$tree_key-$patch_key
[ $print_key = 1 ] && { echo "$key"; exit 0; }

install_engine() {
  step="installing $output"
  mkdir -p "$(dirname "$output")"
  if ! cmp -s "$cache/engines/$key/llama-server" "$output"; then
    cp "$cache/engines/$key/llama-server" "$output.new" && mv -f "$output.new" "$output"  # a running engine keeps its old file
  fi
  say "engine ready: $output (key $key)"
  touch "$cache/engines/$key"
  local old
  for old in $(cd "$cache/engines" && find . -mindepth 1 -maxdepth 1 -printf '%T@ %f\n' 2>/dev/null | sort -rn | tail -n +25 | cut -d' ' -f2); do
    rm -rf "${cache:?}/engines/$old"  # the last 24 that were used stay
  done
}
link_tree() {  # vendor/llamafile/llama.cpp: the tree, for reading; an installed package is left as it is
  local link=$root/vendor/llamafile/llama.cpp
  [ -n "$source_dir$sanitize" ] || [ ! -e "$root/pyproject.toml" ] || [ ! -d "$cache/trees/$tree_key/src" ] || { [ -e "$link" ] && [ ! -L "$link" ]; } || ln -sfn "$cache/trees/$tree_key/src" "$link"
}

if [ $times = 0 ] && [ -x "$cache/engines/$key/llama-server" ]; then install_engine; link_tree; exit 0; fi

# --- one build at a time ----------------------------------------------------------------------------------------
step="waiting for the build lock"
mkdir -p "$cache/downloads" "$cache/trees" "$cache/engines"
hold_lock 9 "$cache/lock" build
if [ $times = 0 ] && [ -x "$cache/engines/$key/llama-server" ]; then install_engine; link_tree; exit 0; fi

# --- unpack ----------------------------------------------------------------------------------------
tree=$cache/trees/$tree_key
if [ ! -e "$tree/.unpacked" ]; then
  rm -rf "$tree"; mkdir -p "$tree/src"
  if [ -n "$source_dir" ]; then
    step="copying $source_dir"; say "$step"
    [ -f "$source_dir/tools/server/server-context.cpp" ] || fail "no tools/server/server-context.cpp there; --source takes a llama.cpp tree"
    cp -R "$source_dir/." "$tree/src/"
  else
    get_source
    step="unpacking the engine source"; say "$step"
    tar -xzf "$sdist" -C "$tree/src" --strip-components=3 --wildcards '*/vendor/llama.cpp/*' || fail "the archive holds no vendor/llama.cpp"
  fi
  rm -rf "$tree/src/.git"
  touch "$tree/.unpacked"
fi

# --- apply the series: compute the wanted files aside, then copy only what differs --------------------------------
step="applying the patch series"
rm -rf "$tree"/wanted.*  # left by a run that was killed: we hold the lock
wanted=$(mktemp -d "$tree/wanted.XXXXXX")
mkdir -p "$tree/pristine"; touch "$tree/overlay"
touched=$(for p in "${series[@]}"; do grep -hE '^\+\+\+ b/' "$root/patches/$p" | cut -c7- ; done | sort -u)
for f in $touched; do  # keep the pristine text of every file that a patch ever touched
  if [ ! -e "$tree/pristine/$f" ]; then
    [ -f "$tree/src/$f" ] || fail "the source has no $f"
    mkdir -p "$tree/pristine/$(dirname "$f")"; cp -p "$tree/src/$f" "$tree/pristine/.new"; mv "$tree/pristine/.new" "$tree/pristine/$f"
  fi
  mkdir -p "$wanted/$(dirname "$f")"; cp "$tree/pristine/$f" "$wanted/$f"
done
for p in "${series[@]}"; do
  # outside of any repository, or git would skip files silently
  (cd "$wanted" && env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE GIT_CEILING_DIRECTORIES="$tree" git apply --whitespace=nowarn "$root/patches/$p") \
    || fail "patches/$p does not apply to this source (no fuzz is allowed); see patches/README.md on refreshing a patch"
done
[ $patched = 1 ] && cp -R "$root/patches/src/." "$wanted/"
(cd "$wanted" && find . -type f | sed 's#^\./##' | sort) > "$tree/overlay.new"
sort -u "$tree/overlay" "$tree/overlay.new" > "$tree/overlay.both" && mv "$tree/overlay.both" "$tree/overlay"  # an interruption leaves no file unknown
while read -r f; do  # files of an earlier series that this one does not have: back to pristine, or gone
  [ -e "$wanted/$f" ] && continue
  if [ -e "$tree/pristine/$f" ]; then cmp -s "$tree/pristine/$f" "$tree/src/$f" || cp "$tree/pristine/$f" "$tree/src/$f"; else rm -f "$tree/src/$f"; fi
done < "$tree/overlay"
while read -r f; do
  cmp -s "$wanted/$f" "$tree/src/$f" 2>/dev/null || { mkdir -p "$(dirname "$tree/src/$f")"; cp "$wanted/$f" "$tree/src/$f"; }
done < "$tree/overlay.new"
mv "$tree/overlay.new" "$tree/overlay"
link_tree

# --- configure and build ----------------------------------------------------------------------------------------
step="installing cmake and ninja"
tools=$cache/tools
ensure_tools 'cmake>=3.28,<5' 'ninja>=1.11'
step="configuring the engine"
# the flags name the checkout's cmake snippet; the tree keeps its own copy, so that any checkout may use it
cp "$root/scripts/engine_flags.cmake" "$tree/engine_flags.cmake"
if [ ! -e "$tree/build/build.ninja" ]; then
  say "$step"
  "$tools/bin/cmake" -S "$tree/src" -B "$tree/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$tools/bin/ninja" -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
    "${flags[@]/"$root/scripts/engine_flags.cmake"/"$tree/engine_flags.cmake"}" >"$tree/configure.log" 2>&1 || { rm -f "$tree/build/build.ninja"; tail -20 "$tree/configure.log" >&2; fail "cmake refused; the whole log is $tree/configure.log"; }
fi
step="compiling the engine"
say "$step with $jobs jobs (about ten minutes the first time on two cores; log: $tree/build.log)"
build=("$tools/bin/ninja" -C "$tree/build" -j "$jobs" llama-server)  # no function: its redirection would swallow what the traps say
started=$SECONDS
if [ -t 2 ]; then "${build[@]}" 2>&1 | tee "$tree/build.log" >&2 || fail "the log is $tree/build.log"
else "${build[@]}" >"$tree/build.log" 2>&1 || { grep -m5 -A8 -E 'error|FAILED' "$tree/build.log" >&2 || tail -20 "$tree/build.log" >&2; fail "the log is $tree/build.log"; }; fi
say "compiled in $((SECONDS - started)) s"
if [ $times = 1 ]; then
  for f in $touched $(cd "$root/patches/src" && find . -name '*.cpp' -o -name '*.inc' | sed 's#^\./##'); do
    touch "$tree/src/$f"; t=$SECONDS; "${build[@]}" >"$tree/build.log" 2>&1 || fail "the log is $tree/build.log"; echo "rebuild after $f: $((SECONDS - t)) s"
  done
fi
mkdir -p "$cache/engines/$key"
cp "$tree/build/bin/llama-server" "$cache/engines/$key/llama-server.new" && mv "$cache/engines/$key/llama-server.new" "$cache/engines/$key/llama-server"
install_engine
