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
product=kvikio
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap_env.sh"

find_python
pins=(kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0 cuda-pathfinder==1.9.1 nvidia-cufile==1.20.0.107
    "$(pin packaging)" "$(pin numpy)" "$(pin msgspec)" "$(pin xxhash)")

install_all() { pip_install kvikio --no-deps "${pins[@]}"; }
provide "kvikio-26.10.0-$tag" "${pins[*]}" 'import kvikio, msgspec, xxhash' '120 MB' 0
