#!/usr/bin/env bash
# The first run on a GPU: one command, no network, eight minutes (docs/device-copies.md).
#
#   tests/gpu/first_run.sh      PYTHON=python3 OUT=out/gpu
#
# The machine has Python 3.12, torch, Triton, transformers, pytest and numpy; the rest lies in
# tests/gpu/wheels (collect_wheels.sh). Writes a line for each piece into $OUT/first_run.jsonl when
# it ends, what they said into $OUT/first_run.log, and the benchmarks' reports beside it. Exit
# status 0: no piece failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p build/links/tiffin
for part in kvstore messenger kernels conductor bench; do ln -sfn "../../../$part" "build/links/tiffin/$part"; done
ulimit -c 0 # a piece that is late is aborted, to see where it was
exec "${PYTHON:-python3}" tests/gpu/first_run.py
