#!/usr/bin/env bash
# The first run on a GPU: one command, no network, eight minutes (docs/device-copies.md).
#
#   tests/gpu/first_run.sh      PYTHON=python3 OUT=out/gpu
#
# The machine has Python 3.12, torch, Triton, transformers, pytest and numpy; the rest lies in
# tests/gpu/wheels (collect_wheels.sh). Writes a line for each piece into $OUT/first_run.jsonl when
# it ends, and what it said into $OUT/PIECE.log. Exit status 0: no piece failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export OUT=${OUT:-out/gpu}
mkdir -p "$OUT" build/links/tiffin
for part in kvstore messenger kernels conductor bench; do ln -sfn "../../../$part" "build/links/tiffin/$part"; done
packages=$PWD/build/gpu-packages
rm -rf "$packages"
missing=() # what the machine has, it keeps
for wheel in tests/gpu/wheels/*.whl; do
    name=$(basename "${wheel%%-*}")
    "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null || missing+=("$wheel")
done
if [ -e "${missing[0]:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "${missing[@]}"
fi
export PYTHONPATH=$PWD/build/links:$packages HF_HUB_OFFLINE=1
exec "$python" tests/gpu/first_run.py
