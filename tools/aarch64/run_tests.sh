#!/usr/bin/env bash
# tools/aarch64/run_tests.sh: what the stage `aarch64_python` runs of the Python tests, on the set `neon`.
set -euo pipefail
folder=tests/python
run() { tools/aarch64/python.sh -m pytest -q -p no:cacheprovider --durations=10 "$@"; }

tools/aarch64/python.sh -c "import monograph; monograph.show_config()" | tee build/aarch64-config.txt
grep -q '^isa  *neon$' build/aarch64-config.txt
ops=(rms_norm rotary gated_activation adamw gram seeded_dropout choose_experts linear linear_cross_entropy varlen_attention)
# Not what compiles, what takes minutes even without an emulator, or measures memory.
run $(printf "$folder/ops/test_%s.py " "${ops[@]}") -k "not graph and not 2000 and not random_packings and not memory"
run $folder/training/test_batch_keys.py -k eager
