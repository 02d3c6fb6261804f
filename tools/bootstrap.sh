#!/usr/bin/env bash
# Sets up a working copy: system packages, .venv, and kvfs in it (editable).
#
#   tools/bootstrap.sh demo    what `make demo` needs
#   tools/bootstrap.sh dev     that and what the tests and checks need
#
# Runs in less than two seconds when nothing has to be done: a stamp in .venv bears the hash of what it was made from.
# Needs bash, and Python >= 3.11; as root it installs what else is missing, otherwise it prints the command for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-dev}
case $what in
    demo) extras=demo ;;
    dev) extras=dev,demo ;;
    *) echo "usage: tools/bootstrap.sh [demo|dev]" >&2; exit 2 ;;
esac

say() { printf 'kvfs set-up: %s\n' "$*"; }
fail() { printf 'kvfs set-up: %s\n' "$*" >&2; exit 1; }
trap 'printf "kvfs set-up: interrupted; the next run goes on\n" >&2; exit 130' INT  # comes before an `|| fail`

if [ "$(uname -s)" != Linux ]; then fail "kvfs needs Linux: it is a FUSE file system"; fi

find_python() {
    # A pyenv shim may exist for a version that is not selected, so each candidate is run. What is printed is the
    # interpreter itself, not the shim.
    local candidate path
    for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3 python3.14 python; do
        if path=$("$candidate" -c 'import sys; assert sys.version_info >= (3, 11); print(sys.executable)' 2>/dev/null); then
            printf '%s\n' "$path"
            return
        fi
    done
    return 1
}

missing_packages() {
    # Looks for what is used, not for package names: a compiler or a Python from elsewhere will do.
    local packages=()
    command -v fusermount3 >/dev/null || packages+=(fuse3)
    command -v getfattr >/dev/null || packages+=(attr)
    if [ "$1" = build ]; then
        command -v pkg-config >/dev/null || packages+=(pkg-config)
        pkg-config --exists fuse3 2>/dev/null || packages+=(libfuse3-dev)
        command -v gcc >/dev/null || packages+=(gcc)
        [ -e /usr/include/stdlib.h ] || packages+=(libc6-dev)
        "$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=("$(python_package venv)")
        "$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
            2>/dev/null || packages+=("$(python_package dev)")
    fi
    printf '%s\n' "${packages[*]}"
}

python_package() {
    # Debian's name for the venv or dev part of $python: python3-venv goes with /usr/bin/python3 only.
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(readlink -f "$python")" = "$(readlink -f /usr/bin/python3)" ]; then version=3; fi
    printf 'python%s-%s\n' "$version" "$1"
}

install_packages() {
    local packages=$1
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null || fail "missing: $packages; install the like with your system's package manager"
    local -a list
    read -ra list <<<"$packages"
    if [ "$(id -u)" != 0 ]; then
        fail "missing system packages; run: sudo apt-get update && sudo apt-get install -y --no-install-recommends $packages"
    fi
    say "installing system packages: $packages"
    export DEBIAN_FRONTEND=noninteractive
    local log
    log=$(mktemp)
    apt-get update -qq >"$log" 2>&1 </dev/null || say "apt-get update failed; trying with the package lists at hand"
    if ! apt-get install -y -qq --no-install-recommends "${list[@]}" >>"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install: $packages"
    fi
    rm -f "$log"
}

python=$(find_python) ||
    fail "no Python >= 3.11 found; on Debian 12, Ubuntu 24.04 or later: apt-get install python3"

hash=$({ cat pyproject.toml constraints.txt tools/bootstrap.sh kvfs/__init__.py; pwd; } | sha256sum | cut -d' ' -f1)
is_current() {
    local stamp
    for stamp in "$@"; do
        if [ "$(cat ".venv/.kvfs-$stamp" 2>/dev/null)" = "$hash" ]; then return 0; fi
    done
    return 1
}
if .venv/bin/python -c '' 2>/dev/null && is_current dev "$what"; then
    install_packages "$(missing_packages run)"
    exit 0
fi

install_packages "$(missing_packages build)"

if ! .venv/bin/python -c 'import sys; assert sys.version_info >= (3, 11); import pip' 2>/dev/null; then
    say "making .venv with $("$python" -V) ($python)"
    rm -rf .venv
    "$python" -m venv .venv
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq)
options=(--constraint constraints.txt)
torch=$(sed -n 's/^torch==//p' constraints.txt)
if ! command -v nvidia-smi >/dev/null &&
    ! .venv/bin/python -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '$torch'" 2>/dev/null &&
    ! "${pip[@]}" --dry-run --no-deps "torch==$torch+cpu" >/dev/null 2>&1; then
    # No GPU, and none of the configured package sources has a torch without CUDA: use torch's own source of them.
    options+=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi

say "installing kvfs[$extras] into .venv (torch among it: about 200 MB to fetch the first time)"
"${pip[@]}" "${options[@]}" --editable ".[$extras]" </dev/null ||
    fail "pip could not install kvfs; what it said stands above"

printf '%s\n' "$hash" > ".venv/.kvfs-$what"
say "done; kvfs is .venv/bin/kvfs"
