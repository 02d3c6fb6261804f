#!/usr/bin/env bash
# Sets up a Python with LMCache that runs without a GPU, and prints its path as the last line of standard output.
#
#   tools/bootstrap_lmcache.sh
#
# LMCache asks for the CUDA of its GPU paths, which no machine without a GPU needs: it is installed without its
# dependencies, and those of its CPU paths beside it. That is an environment of its own, 1.2 GB under the user's cache
# directory, found there by every later run and every other checkout. kvfs is not installed in it.
# KVFS_LMCACHE_PYTHON=/path/to/python names an installed LMCache to use instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.5.6
say() { printf 'kvfs set-up of LMCache: %s\n' "$*" >&2; }
fail() { printf 'kvfs set-up of LMCache: %s\n' "$*" >&2; exit 1; }
export LMCACHE_TRACK_USAGE=false
check='from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.multiprocess.token_hasher import TokenHasher
import lmcache.lmcache_fs, lmcache.v1.distributed.l2_adapters'

if [ -n "${KVFS_LMCACHE_PYTHON:-}" ]; then
    "$KVFS_LMCACHE_PYTHON" -c "$check" >/dev/null 2>&1 ||
        fail "$KVFS_LMCACHE_PYTHON (KVFS_LMCACHE_PYTHON) cannot import LMCache's storage backends"
    printf '%s\n' "$KVFS_LMCACHE_PYTHON"
    exit 0
fi

case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "LMCache has no build for $(uname -m)" ;;
esac
python=""
for candidate in .venv/bin/python python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; assert (3, 11) <= sys.version_info < (3, 14)' 2>/dev/null; then
        python=$("$candidate" -c 'import sys; print(sys._base_executable or sys.executable)')
        break
    fi
done
[ -n "$python" ] || fail "no Python from 3.11 to 3.13 with venv was found"

torch=$(grep '^torch==' constraints.txt)
needed=(
    'numpy<=2.2.6' 'setuptools>=77.0.3,<81' filelock typing-extensions sympy networkx jinja2 fsspec aiofile aiofiles blake3
    aiohttp fastapi httpx 'huggingface_hub>=1.5.0' msgspec numba nvtx 'opentelemetry-api<=1.40.0' opentelemetry-sdk
    opentelemetry-exporter-otlp 'opentelemetry-exporter-prometheus<=0.61b0' 'prometheus_client<=0.24.1' psutil py-cpuinfo
    pyyaml 'pyzmq>=25' 'protobuf>=6.31.1,<7' redis safetensors sortedcontainers 'transformers>=5.4' uvicorn httptools
    cachetools xxhash cryptography cbor2
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvfs/envs
name=lmcache-$version-py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
target=$cache/$name
wanted="lmcache==$version $torch ${needed[*]}"
is_ready() { [ "$(cat "$target/.kvfs" 2>/dev/null)" = "$wanted" ] && "$target/bin/python" -c '' 2>/dev/null; }

if ! is_ready; then
    mkdir -p "$cache"
    exec 9>"$cache/.$name.lock"
    flock 9 # another run is making it
    if ! is_ready; then
        free_kib=$(df -Pk "$cache" | awk 'NR == 2 {print $4}')
        [ "$free_kib" -gt $((3 * 1024 * 1024)) ] || fail "3 GiB have to be free in $cache"
        say "making $target (1.2 GB, a minute or two)"
        rm -rf "$target"
        "$python" -m venv "$target"
        pip=("$target/bin/python" -m pip --disable-pip-version-check install -q --no-warn-script-location)
        options=()
        if ! "${pip[@]}" --dry-run --no-deps "$torch+cpu" >/dev/null 2>&1; then
            options+=(--extra-index-url https://download.pytorch.org/whl/cpu)
        fi
        install() {
            "${pip[@]}" "$@" </dev/null >&2 2>"$target/pip.log" ||
                { tail -n 5 "$target/pip.log" >&2; fail "pip could not install LMCache $version (no network, or no wheel for this Python?); its words stand above"; }
        }
        install --no-deps ${options[@]+"${options[@]}"} "$torch+cpu"
        install "${needed[@]}"
        install --no-deps "lmcache==$version"
        "$target/bin/python" -c "$check" >"$target/import.log" 2>&1 ||
            { tail -n 1 "$target/import.log" >&2; fail "the LMCache that was installed cannot be imported"; }
        printf '%s\n' "$wanted" >"$target/.kvfs"
        say "done"
    fi
fi
printf '%s\n' "$target/bin/python"
