#!/usr/bin/env bash
# Installs the peers of `tiffin bench vllm`, LMCache and Mooncake, each in a folder of its own, beside
# an environment that has vLLM (tests/engines/install.sh) and without changing it:
#
#   install_peers.sh .venv-engines/bin/python FOLDER
#   tiffin bench vllm --vllm .venv-engines/bin/python --peers FOLDER --row lmcache --row mooncake
#
# Mooncake also needs libraries of the system: apt install libibverbs1 librdmacm1 libnuma1
set -euo pipefail
python=$1 folder=$2

install() {
    "$python" -m pip install --quiet --no-deps --upgrade --target "$folder/$1" "${@:2}"
}

# Without dependencies: vLLM has brought nearly all of them, and the others are for GPUs. In folders
# apart, as LMCache imports a Mooncake that is there, and then needs its libraries too.
install lmcache lmcache==0.5.6 sortedcontainers aiofile caio
install mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1
