#!/usr/bin/env bash
# Collects what `first_run.sh` needs beside torch, Triton, transformers and pytest, as wheels in
# tests/gpu/wheels: for CPython 3.12 on x86_64. Needs a package index; 50 MB at most.
set -euo pipefail
cd "$(dirname "$0")"
rm -rf wheels
"${PYTHON:-python3}" -m pip download --quiet --dest wheels --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    "msgspec>=0.18.6" "ml-dtypes>=0.4" "rich>=13.7" "typer>=0.12" "uvloop>=0.19" "xxhash>=3.4" \
    "hypothesis>=6.100" "pytest-timeout>=2.3"
rm -f wheels/numpy-* wheels/pytest-[0-9]* # torch's machine has them
kib=$(du -sk wheels | cut -f1)
((kib <= 50 * 1024)) || { echo "tests/gpu/wheels: $kib KiB, more than 50 MB" >&2; exit 1; }
echo "tests/gpu/wheels: $kib KiB"
