#!/usr/bin/env bash
# tools/aarch64/python.sh ARGUMENTS...: the Python of build/aarch64-root under qemu-user with torch and what build/aarch64-site has. It
# starts no other program: the kernel of the host would not know what to do with one.
set -euo pipefail
build=$PWD/build
# Cortex-A72 is Armv8.0-A: a kernel that wants more than NEON stops.
exec qemu-aarch64 -cpu cortex-a72 -L "$build/aarch64-root" \
  -E LD_LIBRARY_PATH="$build/aarch64-cuda:$build/aarch64-torch/nvidia/cu13/lib" \
  -E PYTHONPATH="$build/aarch64-site:$build/aarch64-torch" -E OMP_NUM_THREADS=1 \
  "$build/aarch64-root/usr/bin/python3" "$@"
