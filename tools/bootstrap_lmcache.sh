#!/usr/bin/env bash
# Sets up a Python with LMCache that runs without a GPU, and prints its path as the last line of standard output.
#
#   tools/bootstrap_lmcache.sh
#
# LMCache asks for the CUDA of its GPU paths, which no machine without a GPU needs: it is installed without its
# dependencies, and those of its CPU paths beside it. That is an environment of its own, 1.2 GB under the user's cache
# directory, found there by every later run and every other checkout. kvfs is not installed in it.
# KVFS_LMCACHE_PYTHON=/path/to/python names an installed LMCache to use instead.
product=LMCache
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap_env.sh"

version=0.5.6
export LMCACHE_TRACK_USAGE=false
imports='from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.multiprocess.token_hasher import TokenHasher
import lmcache.lmcache_fs, lmcache.v1.distributed.l2_adapters'
use_named KVFS_LMCACHE_PYTHON "$imports" "LMCache's storage backends"
needs_wheels LMCache
find_python 13
torch=$(pin torch)
needed=(
    'numpy<=2.2.6' 'setuptools>=77.0.3,<81' filelock typing-extensions sympy networkx jinja2 fsspec aiofile aiofiles blake3
    aiohttp fastapi httpx 'huggingface_hub>=1.5.0' msgspec numba nvtx 'opentelemetry-api<=1.40.0' opentelemetry-sdk
    opentelemetry-exporter-otlp 'opentelemetry-exporter-prometheus<=0.61b0' 'prometheus_client<=0.24.1' psutil py-cpuinfo
    pyyaml 'pyzmq>=25' 'protobuf>=6.31.1,<7' redis safetensors sortedcontainers 'transformers>=5.4' uvicorn httptools
    cachetools xxhash cryptography cbor2
)

install_all() {
    local what="LMCache $version"
    find_torch "$torch+cpu"
    pip_install "$what" --no-deps ${source_of_torch[@]+"${source_of_torch[@]}"} "$torch+cpu"
    pip_install "$what" "${needed[@]}"
    pip_install "$what" --no-deps "lmcache==$version"
}
provide "lmcache-$version-$tag" "lmcache==$version $torch ${needed[*]}" "$imports" '1.2 GB, a minute or two' 3
