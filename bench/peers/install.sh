#!/usr/bin/env bash
# Makes an environment for each peer of `tiffin bench peers` and of the routers of `tiffin bench
# gateway`, beside ours and without changing it:
#
#   install.sh PYTHON FOLDER [PEER ...]
#
# PEER is mooncake, lmcache, dynamo, sglang, vllm-router or production-stack; the default is all but
# the last, whose package is not on PyPI, only its source at GitHub: 2.3 GB in FOLDER, most of it
# LMCache's torch. pip must find torch's builds for CPUs, as for tests/engines/install.sh.
# Mooncake also needs libraries of the system: apt install libibverbs1 librdmacm1 libnuma1
set -euo pipefail
python=$1 folder=$2
shift 2

environment() { # NAME REQUIREMENT ...
    "$python" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet "${@:2}"
}

mooncake() {
    environment mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.4.6
}

# Without most of its dependencies, which are for GPUs and for clouds: these are what its storage
# backends and its hashes import.
lmcache() {
    environment lmcache torch==2.13.0+cpu numpy==2.2.6 aiofile aiohttp blake3 cachetools cryptography \
        httpx msgspec numba nvtx "opentelemetry-sdk<=1.40" "opentelemetry-exporter-otlp<=1.40" \
        "opentelemetry-exporter-prometheus<=0.61b0" "prometheus-client<=0.24.1" psutil py-cpuinfo \
        pyyaml pyzmq redis safetensors "setuptools<81" sortedcontainers transformers
    "$folder/lmcache/bin/pip" install --quiet --no-deps lmcache==0.5.6
}

dynamo() {
    environment dynamo ai-dynamo-runtime==1.6.1
}

sglang() {
    environment sglang sglang-router==0.3.2
}

vllm-router() { # of github.com/vllm-project/router
    environment vllm-router vllm-router==0.1.17
}

# Its package has the same name as the one above. Its router runs on Python 3.11 as well, whatever
# the package says.
production-stack() {
    environment production-stack --ignore-requires-python \
        "vllm-router @ git+https://github.com/vllm-project/production-stack@vllm-stack-0.1.12"
}

for peer in "${@:-mooncake lmcache dynamo sglang vllm-router}"; do
    for name in $peer; do "$name"; done
done
