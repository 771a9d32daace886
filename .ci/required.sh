# Stages of the required lane, in order; sourced by .ci/run. One release build, one wheel that everything else uses.

install() { .ci/install; }

lint() {
  # A merge that was not finished.
  ! git grep -nE '^(<{7}|>{7}) ' || return 1
  ruff check python tests tools
  ruff format --check python tests tools
  mypy
  git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' | xargs clang-format-14 --dry-run --Werror
  python tools/check_tree.py
  python tools/check_prose.py
}

# The workflows, templates and the citation against their schemas, and zizmor's rules.
workflows() {
  local check=(check-jsonschema --builtin-schema)
  "${check[@]}" vendor.github-workflows .github/workflows/*.yml
  "${check[@]}" vendor.github-issue-forms $(ls .github/ISSUE_TEMPLATE/*.yml | grep -v /config.yml)
  "${check[@]}" vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
  "${check[@]}" vendor.dependabot .github/dependabot.yml
  "${check[@]}" vendor.citation-file-format CITATION.cff
  zizmor --offline --no-progress .github
}

release() {
  cmake --preset release >/dev/null
  cmake --build --preset release
  ctest --preset release -j 2
  python tools/check_tree.py --build build/release
}

# A small project that links the libraries: against an installed tree, and including this one.
installed() {
  rm -rf build/installed
  cmake --install build/release --prefix build/installed/prefix --component development >/dev/null
  cmake -S tests/installed -B build/installed/found -G Ninja \
    -DCMAKE_PREFIX_PATH="$PWD/build/installed/prefix" >/dev/null
  # The flags of the release stage, so that ccache has every object already.
  cmake -S tests/installed -B build/installed/included -G Ninja -DMONOGRAPH_FOLDER="$PWD" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG" -DMONOGRAPH_WARNINGS=ON -DMONOGRAPH_WERROR=ON \
    -DCMAKE_CXX_COMPILER_LAUNCHER=ccache >/dev/null
  for how in found included; do
    cmake --build build/installed/$how
    ctest --test-dir build/installed/$how --output-on-failure
  done
}

wheel() {
  rm -rf build/dist
  # The flags of the release stage, so that ccache has every object already.
  python -m pip wheel -q --no-build-isolation --no-deps -w build/dist \
    --config-settings=cmake.define.MONOGRAPH_WERROR=ON .
  python -m pip install -q --force-reinstall --no-deps build/dist/monograph-*-py3-none-*.whl
  python tools/check_abi.py build/dist/monograph-*.whl
}

# Two processes of one thread each: tracing graphs is most of the time, and it is serial.
python_tests() {
  OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist loadfile --durations=15 tests/python -m "not slow and not long"
}

# Operators once for each instruction set but the one that this machine takes by itself.
per_isa() {
  local chosen isa more=""
  chosen=$(python -c "from monograph.ops.show_config import chosen_isa; print(chosen_isa())")
  [[ $chosen != amx ]] || more=avx512_bf16
  for isa in scalar avx2 avx512 $more; do
    [[ $isa == "$chosen" ]] ||
      OMP_NUM_THREADS=1 MONOGRAPH_ISA=$isa python -m pytest -q -n 2 -m "per_isa and not slow and not long" \
        $(grep -rl per_isa tests/python --include 'test_*.py')
  done
}

# 1 GB through `monograph quantize`: bounded memory. The speeds only catch a fall off the fast path: 0.6 of a copy
# and 20 times bitsandbytes are promised, and shown by bench/results/quantize_file.jsonl, on 16 GB and a quiet machine.
quantize_file() {
  python -m monograph.bench quantize_file --quick --json | tee build/quantize_file.jsonl
  python tools/check_bench.py build/quantize_file.jsonl 'cp_warm>=0.3' 'bitsandbytes_warm>=5' \
    'peak_anonymous_gib<=1.5' 'dequantize_anonymous_gib<=1.5' 'merge_anonymous_gib<=1.5'
}

# AddressSanitizer and UndefinedBehaviorSanitizer on everything that reads files or arguments: parsers, the tool, the
# operators' checks, kernels as scalar code and as the best instruction set of this machine. Unit tests but those of the GPU's
# harness (asan_gpu), hostile files through the tool, wrong calls of operators.
asan() {
  local best=avx512
  ! grep -q -m1 amx_tile /proc/cpuinfo || best=amx
  # What is not watched has the flags of the release stage, so that ccache has it already.
  cmake --preset dev -DMONOGRAPH_WATCHED_ISAS="scalar;avx512;$best" >/dev/null
  cmake --build --preset dev
  # Tests of bits go the paths of others, and take minutes here.
  GTEST_FILTER='-*SameBits*:*BitsOfMany*:*AllCodesTimesAllScaleBytes*' ctest --preset dev -j 2 -E '^gpu$' -R "(^[a-z_0-9]*|\\.(scalar|$best))$"
  MONOGRAPH_TOOL=build/dev/cli/monograph python -m pytest -q tests/python/native/test_cli_hostile.py
  hostile_arguments "${HOSTILE_CALLS:-8000}"
}

# Wrong calls of all operators under AddressSanitizer: the sanitised libraries are loaded before the package loads its own.
# Scalar and AMX (which falls back to AVX-512) stand for the other instruction sets.
hostile_arguments() {
  local seed=0
  for isa in scalar amx; do
    seed=$((seed + 1))
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
      ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096 \
      PYTHONPATH="tests/python:${PYTHONPATH:-}" MONOGRAPH_ISA=$isa OMP_NUM_THREADS=2 python -c "
import runpy, torch
for name in ('monograph_ops', 'monograph_bench_ops'):
    torch.ops.load_library(f'build/dev/ops/{name}.so')
runpy.run_path('tests/python/support/hostile_arguments.py', run_name='__main__')
" --calls "$1" --seed $seed --status build/dev/hostile_call ||
      { echo "the call was: --seed $seed --only $(od -An -tu8 build/dev/hostile_call)"; return 1; }
  done
}

# Also the second compiler: what the targets link, by clang.
fuzz() {
  cmake --preset fuzz >/dev/null
  cmake --build --preset fuzz
  fuzz_for "${FUZZ_SECONDS:-60}"
}

# Two targets at a time. What they find goes to build/fuzz/runs; the kept seeds are only read.
fuzz_for() {
  SECONDS_EACH=$1 xargs -P 2 -I{} bash -o pipefail -c '
    name={}; name=${name##*fuzz_}
    mkdir -p "build/fuzz/runs/$name" "tests/files/fuzz/$name"
    {} "build/fuzz/runs/$name" "tests/files/fuzz/$name" -dict=tests/files/fuzz/json.dict \
      -max_total_time="$SECONDS_EACH" -max_len=16384 -print_final_stats=1 2>&1 | tail -n 7 | sed "s/^/$name: /"' \
    < <(find build/fuzz -type f -name 'fuzz_*' -executable | sort)
}

# What a developer runs before a commit: under 5 minutes when build/release is warm. Of the Python tests those of what changed
# and the quickest; the last line counts the others as deselected.
before_commit() {
  lint
  release
  wheel
  OMP_NUM_THREADS=1 python -m pytest -q -n 2 --within "${BEFORE_COMMIT_SECONDS:-200}" tests/python -m "not slow and not long"
}
