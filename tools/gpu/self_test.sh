#!/usr/bin/env bash
# The self-test of a card, in a clone on a machine with a driver: an environment of its own in build/gpu, torch, nvcc in parts,
# the operators with device code for this card, `doctor --device cuda` into build/gpu/report.json, `doctor --verify` of it.
#   tools/gpu/self_test.sh                    torch 2.13.0 as pip finds it
#   tools/gpu/self_test.sh --index-url URL    of another index; the arguments are pip's, for torch
# The exit code is that of doctor: 1 if a test failed. Without a card all else is done, and every test is skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
case " $* " in
  *" -h "* | *" --help "*) sed -n '2,6s/^# //p' tools/gpu/self_test.sh && exit ;;
  *" torch"* | *".whl "*) ;;
  *) set -- "torch==2.13.0" "$@" ;;
esac
export CXX="${CXX:-g++}" CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"

stop() {
  echo "tools/gpu/self_test.sh: $*" >&2
  exit 5
}

step() {
  local start=$SECONDS
  echo "== $1"
  "${@:2}"
  echo "== $1: $((SECONDS - start)) s"
}

# What pip does not bring.
has_header() { "$CXX" -std=c++20 -fsyntax-only "${@:2}" -x c++ - <<<"#include <$1>" 2>/dev/null; }
command -v python3 >/dev/null || stop "no python3, wanted 3.10 or later (Debian: python3-venv)"
command -v "$CXX" >/dev/null || stop "no $CXX, wanted g++ 12 or later (Debian: g++)"
has_header xxhash.h || stop "$CXX finds no xxhash.h (Debian: libxxhash-dev)"
# Of Triton, which compiles what starts its kernels.
has_header Python.h "-I$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" ||
  stop "$CXX finds no Python.h of python3 (Debian: python3-dev)"

folder=build/gpu
python=$folder/python/bin/python
report=$folder/report.json
install() { "$python" -m pip install -q "$@"; }

environment() {
  rm -rf "$folder"
  python3 -m venv "$folder/python"
}

# Versions as in .ci/install, those of others as in pyproject.toml and python/monograph/upstream/tested_versions.py.
libraries() {
  install "scikit-build-core>=1.0" ninja "cmake>=3.25" numpy einops
  install --no-deps "nvidia-cuda-nvcc==13.0.88" "nvidia-cuda-crt==13.0.88" "nvidia-nvvm==13.0.88" "nvidia-cuda-runtime==13.0.96" \
    "bitsandbytes==0.50.2" "fla-core==0.6.0"
}

# Code for this card alone; a card without code of its own takes the PTX of sm_80.
build() {
  local card
  card=$("$python" -c 'import torch; print(*torch.cuda.get_device_capability() if torch.cuda.is_available() else "", sep="")')
  case $card in 80 | 86 | 89 | 90 | 100 | 120) ;; *) card=80 ;; esac
  install --no-build-isolation --config-settings=build-dir="$folder/build" \
    --config-settings=cmake.define.MONOGRAPH_BUILD_CLI=OFF --config-settings=cmake.define.MONOGRAPH_BUILD_CUDA=ON \
    --config-settings=cmake.define.MONOGRAPH_CUDA_ARCHITECTURES="$card" ".[train]"
}

found='import torch; here = torch.cuda.is_available()
print(f"torch {torch.__version__}, CUDA {torch.version.cuda},", torch.cuda.get_device_name() if here else "no card")'

step "environment" environment
step "torch: pip install $*" install "$@"
step "libraries" libraries
"$python" -c "$found"
step "build" build
echo "prepared in $SECONDS s"
code=0
"$python" -m monograph doctor --device cuda --out "$report" || code=$?
"$python" -m monograph doctor --verify "$report"
echo "all in $SECONDS s: $report"
exit "$code"
