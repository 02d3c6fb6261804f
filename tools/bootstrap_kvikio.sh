#!/usr/bin/env bash
# Sets up a Python with the real kvikio for tests on machines without a GPU, and prints its path as the last line of
# standard output.
#
#   tools/bootstrap_kvikio.sh
#
# kvikio's own requirements (cupy and CUDA's libraries, 2 GB) are left out: what reads files does not need them. Twelve
# seconds the first time, 120 MB under the user's cache directory, found there by every later run and other checkout.
# It is no environment to read into a real GPU with: for that, pip install 'kvfs[gds]'.
# kvfs itself is not installed in it; it is reached through PYTHONPATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted=(kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0 cuda-pathfinder==1.9.1
    nvidia-cufile==1.20.0.107 packaging numpy)
say() { printf 'kvfs set-up of kvikio: %s\n' "$*" >&2; }
fail() { printf 'kvfs set-up of kvikio: %s\n' "$*" >&2; exit 1; }

python=""
for candidate in .venv/bin/python python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; assert (3, 11) <= sys.version_info' 2>/dev/null; then
        python=$("$candidate" -c 'import sys; print(sys._base_executable or sys.executable)')
        break
    fi
done
[ -n "$python" ] || fail "no Python >= 3.11 with venv was found"

pins=()
for package in "${wanted[@]}" msgspec xxhash; do
    case $package in
        *==*) pins+=("$package") ;;
        *) pins+=("$(grep "^$package==" constraints.txt)") ;;
    esac
done
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvfs/envs
name=kvikio-26.10.0-py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
target=$cache/$name
is_ready() { [ "$(cat "$target/.kvfs" 2>/dev/null)" = "${pins[*]}" ] && "$target/bin/python" -c '' 2>/dev/null; }

if ! is_ready; then
    mkdir -p "$cache"
    exec 9>"$cache/.$name.lock"
    flock 9 # another run is making it
    if ! is_ready; then
        say "making $target (120 MB)"
        rm -rf "$target"
        "$python" -m venv "$target"
        "$target/bin/python" -m pip --disable-pip-version-check install -q --no-deps --no-warn-script-location \
            "${pins[@]}" </dev/null >&2 2>"$target/pip.log" ||
            { tail -n 5 "$target/pip.log" >&2; fail "pip could not install kvikio (no network, or no wheel for this Python?); its words stand above"; }
        "$target/bin/python" -c 'import kvikio, msgspec, xxhash' 2>"$target/import.log" ||
            { tail -n 1 "$target/import.log" >&2; fail "the kvikio that was installed cannot be imported"; }
        printf '%s\n' "${pins[*]}" >"$target/.kvfs"
        say "done"
    fi
fi
printf '%s\n' "$target/bin/python"
