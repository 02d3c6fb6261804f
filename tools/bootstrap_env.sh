# What bootstrap_vllm.sh, bootstrap_lmcache.sh and bootstrap_kvikio.sh share; they source it.
#
# Software that is not kvfs gets an environment of its own below the user's cache directory, found there by every later
# run and every other checkout. It is made under a lock, and whole when its stamp, `.kvfs`, says what it was made of.
# kvfs is not installed in it.
#
# Before it sources this, a script sets `product`, the name in messages. It may call `use_named` and `needs_wheels`, then
# calls `find_python`, and at last `provide`, which calls the script's function `install_all`. That installs into
# "$target" by `pip_install`. Standard output is the path of the Python alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'kvfs set-up of %s: %s\n' "$product" "$*" >&2; }
fail() { say "$*"; exit 1; }

# use_named VARIABLE IMPORTS WHAT: the Python that the user names is used as it is; the IMPORTS have to succeed there.
use_named() {
    local named=${!1:-}
    [ -n "$named" ] || return 0
    "$named" -c "$2" >/dev/null 2>&1 || fail "$named ($1) cannot import $3"
    printf '%s\n' "$named"
    exit 0
}

# needs_wheels WHAT: it is published for these machines only.
needs_wheels() {
    case $(uname -m) in
        x86_64 | aarch64) ;;
        *) fail "$1 has no build for $(uname -m)" ;;
    esac
}

# find_python [LAST]: sets `python`, one from 3.11 to 3.LAST, and `tag`, the like of py311.
find_python() {
    local candidate below="(3, ${1:-98} + 1)" wanted=">= 3.11"
    [ -z "${1:-}" ] || wanted="from 3.11 to 3.$1"
    python=""
    for candidate in .venv/bin/python python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c "import sys, venv, ensurepip; assert (3, 11) <= sys.version_info < $below" 2>/dev/null; then
            python=$("$candidate" -c 'import sys; print(sys._base_executable or sys.executable)')
            break
        fi
    done
    [ -n "$python" ] || fail "no Python $wanted with venv was found"
    tag=py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
}

# pin PACKAGE: the version that the project uses, as PACKAGE==VERSION.
pin() { grep "^$1==" constraints.txt; }

# pip_install WHAT ARGUMENTS…: into the new environment; WHAT is its name where it fails.
pip_install() {
    local what=$1
    shift
    "${pip[@]}" "$@" </dev/null >&2 2>"$target/pip.log" || {
        tail -n 5 "$target/pip.log" >&2
        fail "pip could not install $what (no network, or no wheel for this Python?); its words stand above"
    }
}

# find_torch TORCH: sets `source_of_torch`, the options with which pip finds that build for the CPU.
find_torch() {
    source_of_torch=()
    if ! "${pip[@]}" --dry-run --no-deps "$1" >/dev/null 2>&1; then
        source_of_torch=(--extra-index-url https://download.pytorch.org/whl/cpu) # torch's own source of such builds
    fi
}

# provide NAME STAMP IMPORTS SIZE GIB: makes the environment NAME unless it is there, and prints its Python. SIZE is said
# first; GIB have to be free, 0 for no such demand.
provide() {
    local name=$1 stamp=$2 imports=$3 size=$4 needed_gib=$5
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvfs/envs
    target=$cache/$name
    is_ready() { [ "$(cat "$target/.kvfs" 2>/dev/null)" = "$stamp" ] && "$target/bin/python" -c '' 2>/dev/null; }
    if ! is_ready; then
        mkdir -p "$cache"
        exec 9>"$cache/.$name.lock"
        flock 9 # another run is making it
        if ! is_ready; then
            make_env
        fi
    fi
    printf '%s\n' "$target/bin/python"
}

make_env() {
    local free_kib
    free_kib=$(df -Pk "$cache" | awk 'NR == 2 {print $4}')
    [ "$needed_gib" -eq 0 ] || [ "$free_kib" -gt $((needed_gib * 1024 * 1024)) ] ||
        fail "$needed_gib GiB have to be free in $cache"
    say "making $target ($size)"
    rm -rf "$target"
    "$python" -m venv "$target"
    pip=("$target/bin/python" -m pip --disable-pip-version-check install -q --no-warn-script-location)
    install_all
    "$target/bin/python" -c "$imports" >"$target/import.log" 2>&1 || {
        tail -n 1 "$target/import.log" >&2
        fail "the $product that was installed cannot be imported"
    }
    printf '%s\n' "$stamp" >"$target/.kvfs"
    say "done"
}
