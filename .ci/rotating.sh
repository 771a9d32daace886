# Stages of the rotating lane; sourced by .ci/run. tools/rotation.py has their paths and picks those whose turn it is. They use
# the release build and the wheel of the required lane.

# ThreadSanitizer on what shares memory between threads. Sets that no test below takes have the flags of the release stage, so
# that ccache has them already.
tsan() {
  local best=avx512
  ! grep -q -m1 amx_tile /proc/cpuinfo || best=amx
  cmake --preset tsan -DMONOGRAPH_WATCHED_ISAS="scalar;avx512;$best" >/dev/null
  cmake --build --preset tsan --target test_cpu test_dequantize test_quantize test_linear \
    test_linear_cross_entropy test_varlen_attention test_convert test_merge test_train test_gpu
  # TSan needs a fixed address layout on recent kernels.
  setarch "$(uname -m)" -R ctest --preset tsan \
    -j 2 -R '^((cpu|linear|varlen_attention)\.amx|(dequantize|quantize|linear_cross_entropy|merge)\.avx512|convert|train)$'
  # A switch between fibers is dear here: one type, and tests with barriers and copies.
  setarch "$(uname -m)" -R build/tsan/core/monograph/gpu/test_gpu \
    --gtest_filter='GpuFaults*:GpuPrims.Groups*:GpuMma*Small*:GpuLinear/1.Slices*:GpuLoss/1.Gradients*:GpuDequantize/1.Odd*'
}

# The GPU's kernels on the host harness under AddressSanitizer.
asan_gpu() {
  cmake --preset dev >/dev/null
  cmake --build --preset dev --target test_gpu
  ctest --preset dev -R '^gpu$'
}

# Not the units of instruction sets: they only instantiate headers, and are most of the time.
tidy_files() {
  cmake -B build/tidy -G Ninja -DCMAKE_CXX_COMPILER=clang++-14 -DMONOGRAPH_BUILD_OPS=ON \
    -DMONOGRAPH_BUILD_CUDA=ON -DMONOGRAPH_BUILD_CLI=ON >/dev/null
  git ls-files "$@" | grep -vE '/tests/|/(scalar|avx2|avx512|amx|neon)\.cpp|_aarch64\.cpp' | xargs -P 2 -n 4 clang-tidy-14 --quiet -p build/tidy
}

tidy_core() { tidy_files 'core/*.cpp'; }

tidy_rest() { tidy_files 'ops/*.cpp' 'cli/*.cpp'; }

# Cross build for 64-bit Arm, tests under qemu.
aarch64() {
  cmake --preset aarch64 >/dev/null
  cmake --build --preset aarch64
  ctest --preset aarch64 -j 2
}

# The wheel for 64-bit Arm, cross-built: the operator library is linked to torch's own for Arm, with no symbol left open.
aarch64_operators() {
  local torch=build/aarch64-torch define=--config-settings=cmake.define
  [[ -d $torch/torch ]] || {
    python -m pip download -q -d $torch --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
      --platform manylinux2014_aarch64 torch==2.13.0 nvidia-cuda-runtime==13.0.96
    for wheel in $torch/*.whl; do python -m zipfile -e "$wheel" $torch; done
  }
  rm -rf build/aarch64-dist
  _PYTHON_HOST_PLATFORM=linux-aarch64 python -m pip wheel -q --no-build-isolation --no-deps -w build/aarch64-dist \
    --config-settings=build-dir=build/aarch64-wheel $define.CMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" \
    $define.MONOGRAPH_WERROR=ON $define.MONOGRAPH_TORCH_DIR="$PWD/$torch/torch" \
    $define.CLI11_FOLDER=/usr/include $define.XXHASH_FOLDER=/usr/include \
    "$define.CMAKE_MODULE_LINKER_FLAGS=-Wl,-z,defs -Wl,--allow-shlib-undefined" .
  readelf -h build/aarch64-wheel/ops/monograph_ops.so | grep -q AArch64
  python tools/check_abi.py build/aarch64-wheel/ops/monograph_ops.so
}

# That wheel, imported by Debian's Python for Arm under qemu-user, with torch's own wheel: operators against references, opcheck,
# a training step in eager mode. No test that starts a program or compiles one.
aarch64_python() {
  local site=build/aarch64-site
  [[ -d build/aarch64-root ]] || tools/aarch64/make_root.sh build/aarch64-root
  rm -rf build/aarch64-cuda
  python tools/aarch64/cuda_stand_ins.py build/aarch64-torch build/aarch64-root build/aarch64-cuda
  [[ -d $site/numpy ]] ||
    python -m pip install -q --no-deps --target $site --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
      --platform manylinux_2_24_aarch64 --platform manylinux2014_aarch64 -r .ci/aarch64_requirements.txt
  rm -rf $site/monograph $site/monograph-*.dist-info
  python -m zipfile -e build/aarch64-dist/monograph-*.whl $site
  tools/aarch64/run_tests.sh
}

# The library and its C++ tests by clang; without precompiled headers, so that a missing include is found.
clang() {
  cmake --preset clang >/dev/null
  cmake --build --preset clang
  ctest --preset clang -j 2
}

# The CUDA library for every architecture, or for those given, and AMD's: compiled and looked at. No card is needed.
cuda() {
  local architectures=(${CUDA_ARCHITECTURES:-80 86 89 90 100 120})
  cmake -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DMONOGRAPH_WERROR=ON -DMONOGRAPH_BUILD_OPS=ON \
    -DMONOGRAPH_BUILD_CUDA=ON -DMONOGRAPH_CUDA_ARCHITECTURES="$(IFS=';'; echo "${architectures[*]}")" >/dev/null
  cmake --build build/cuda --target monograph_cuda
  python tools/check_cuda.py build/cuda/ops/cuda/monograph_cuda.so --architectures "${architectures[@]}"
  python tools/check_hip.py ${HIP_ARCHITECTURES:-gfx90a gfx942 gfx1201}
}

# The pages, strictly: a broken link or anchor, or a page that no menu has, fails. The help texts are held to the program.
site() {
  .ci/install site
  python tools/update_cli_page.py --check
  rm -rf build/upload build/site
  python tools/site/assemble_pages.py build/site/pages
  NO_MKDOCS_2_WARNING=1 mkdocs build --strict -q
  grep -q 'A quantised weight as ordinary tensors' build/site/html/docs/reference/monograph.html  # a docstring
  cp -r build/site/html build/upload
}

# Every command and script of the pages: a page that no longer runs is seen soon, and not when a quarter has its turn.
page_tests() {
  OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist loadfile --durations=15 -m slow tests/python/project/test_page_*.py
}

# Tests marked slow or long, cut into quarters by tests/durations.json; those marked apart, and the pages, have stages of their own.
long_tests() {
  OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist loadfile --durations=15 tests/python -m "(slow or long) and not apart" \
    --ignore-glob='*/project/test_page_*.py' --part "$1/4"
}

long_tests_1() { long_tests 1; }

long_tests_2() { long_tests 2; }

long_tests_3() { long_tests 3; }

long_tests_4() { long_tests 4; }

# What may be done between two steps, in every mode and setting: a file that is longer than a quarter.
between_steps() {
  OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist worksteal --durations=15 -m apart tests/python/training/test_between_steps.py
}

# Tests that have more cases than a quarter has time for: plans of 64, 512 and 4,096 ranks, every trainer on two ranks.
scale() {
  OMP_NUM_THREADS=1 MONOGRAPH_LONG=1 python -m pytest -q tests/python/distributed/test_scale.py \
    tests/python/distributed/test_shard.py tests/python/hf/test_trainers_ranks.py
}

# Ranks killed, stopped and cut off in every way; recorded in bench/results/faults.jsonl.
fault_matrix() { PYTHONPATH="tests/python:${PYTHONPATH:-}" python -m support.fault_matrix --json | tee build/faults.jsonl; }

fuzz_long() { FUZZ_SECONDS=${FUZZ_SECONDS:-240} fuzz; }

# 100,000 wrong calls, with the library that asan has built.
hostile_long() {
  cmake --preset dev >/dev/null
  cmake --build --preset dev --target monograph_ops monograph_bench_ops
  hostile_arguments 50000
}

# A selection of the tests on each torch of $TORCH_VERSIONS (the lowest and the newest), with the lowest of all others that is
# accepted.
versions() {
  for torch in ${TORCH_VERSIONS:-2.11.0 2.15.0}; do
    environment "build/versions/$torch" "torch==$torch" "transformers==5.22.0" "peft==0.21.0" "accelerate==1.15.0" \
      "trl==1.16.0" datasets tokenizers "safetensors>=0.8" pyyaml rich matplotlib
    "build/versions/$torch/bin/python" tools/check_versions.py
  done
}

# Two builds of the wheel of a release from two folders, without a cache, are one file. Twice the time of a build.
reproducible() {
  local folder seconds
  .ci/install upload
  seconds=$(git log -1 --format=%ct)
  rm -rf build/reproducible
  for folder in build/reproducible/one build/reproducible/another/place; do
    git clone -q . "$folder"
    (cd "$folder" && CCACHE_DISABLE=1 SOURCE_DATE_EPOCH=$seconds .ci/run upload)
  done
  cmp build/reproducible/one/build/upload/SHA256SUMS build/reproducible/another/place/build/upload/SHA256SUMS
}
