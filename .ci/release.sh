# Stages of hosted runners and of a release; sourced by .ci/run. docs/project/hosting.md says which of them ran where.

install_core() { .ci/install core; }

install_site() { .ci/install site; }

install_upload() { .ci/install upload; }

# The core, the tool and their tests without torch, by $CXX, for the processor of this machine.
core() {
  cmake -B build/core -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$CXX" -DMONOGRAPH_WERROR=ON \
    -DMONOGRAPH_BUILD_TESTS=ON -DMONOGRAPH_BUILD_CLI=ON >/dev/null
  cmake --build build/core
  ctest --test-dir build/core --output-on-failure -j 2
}

# An environment of its own with the wheel of the stage `wheel` and the packages given.
environment() {
  local folder=$1
  shift
  rm -rf "$folder"
  python -m venv "$folder"
  "$folder/bin/pip" install -q "$@" build/dist/monograph-*-py3-none-*.whl pytest numpy
  "$folder/bin/pip" install -q --no-deps "bitsandbytes==0.50.2"
}

# The same selection with what transformers, PEFT and TRL will release next.
main_branches() {
  local github=git+https://github.com/huggingface
  environment build/main_branches "torch==2.13.0" "transformers @ $github/transformers" "peft @ $github/peft" \
    "trl @ $github/trl" "accelerate>=1.15" datasets tokenizers "safetensors>=0.8" pyyaml rich matplotlib
  build/main_branches/bin/python tools/check_versions.py
}

# The self-test of a card; $GPU_TORCH has arguments of `pip install` for a torch that was built for it.
gpu() {
  local torch
  read -ra torch <<<"${GPU_TORCH:-}"
  tools/gpu/self_test.sh "${torch[@]}"
}

# Known holes of what releases are made with and of what is installed; asks PyPI, so for hosted runners.
audit() {
  pip-audit --strict --disable-pip --require-hashes -r .ci/release_requirements.txt
  pip-audit --local
}

# What a release uploads: a wheel linked for manylinux_2_28, checked; the wheel of its native program alone, tried without torch; a
# bill of materials of each; SHA-256 of all. PyPI takes no wheel whose tag is linux_x86_64.
upload() {
  rm -rf build/upload build/stubs build/upload-wheel
  python tools/release/link_stubs.py build/stubs
  export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}"
  LDFLAGS="-L$PWD/build/stubs" python -m pip wheel -q --no-build-isolation --no-deps -w build/upload/linked \
    --config-settings=build-dir=build/upload-wheel --config-settings=cmake.define.MONOGRAPH_WERROR=ON .
  auditwheel repair --plat manylinux_2_28_x86_64 -w build/upload/wheels --exclude 'libtorch*' --exclude 'libc10*' \
    build/upload/linked/monograph-*.whl
  python tools/check_abi.py build/upload/wheels/monograph-*.whl
  python tools/release/bill_of_materials.py build/upload/wheels/monograph-*.whl build/upload/monograph.cdx.json
  tool_wheel build/upload/wheels/monograph-*.whl
  for wheel in build/upload/wheels/*.whl; do auditwheel show "$wheel"; done
  twine check --strict build/upload/wheels/*.whl
  (cd build/upload && sha256sum -- wheels/*.whl ./*.cdx.json | tee SHA256SUMS)
}

# `monograph-tool` from a wheel of monograph, in an environment of its own that has no torch.
tool_wheel() {
  python tools/release/tool_wheel.py "$1" build/upload/wheels
  python tools/release/bill_of_materials.py build/upload/wheels/monograph_tool-*.whl build/upload/monograph-tool.cdx.json
  python -m venv --clear build/upload/tool
  build/upload/tool/bin/python -m pip install -q --no-index build/upload/wheels/monograph_tool-*.whl
  build/upload/tool/bin/python tools/release/tool_smoke_test.py
  rm -r build/upload/tool
}
