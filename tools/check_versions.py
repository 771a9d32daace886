"""A selection of the tests for another version of torch, transformers, PEFT or TRL; not part of CI.

    python -m venv /tmp/older && /tmp/older/bin/pip install torch==2.11.0 transformers==5.22.0 ...
    PYTHONPATH=python /tmp/older/bin/python tools/check_versions.py

Private names, operators, graph counts, loading and one run of a recipe, in one process. What was tried stands
in bench/results/versions.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")
SELECTION = """
upstream/test_private_names.py::test_the_private_name_is_still_there
upstream/test_private_names.py::test_names_set_by_others_are_those_we_read
ops/test_graph.py::test_opcheck[nf4-True]
ops/test_graph.py::test_one_graph_and_no_recompile_over_five_shapes[True]
ops/test_graph.py::test_registration_is_idempotent
nn/test_quant_linear.py::test_forward_is_the_dequantised_layer
nn/test_quant_linear.py::test_weight_is_honest
nn/test_quant_linear.py::test_state_dict_round_trip
quant/test_packed_attributes.py::test_one_graph_in_64_variants[nf4-True-bfloat16-True-True]
quant/test_packed_attributes.py::test_one_graph_in_64_variants[fp4-False-float32-False-False]
quant/test_packed_attributes.py::test_computing_with_the_weight_in_a_graph
quant/test_dequantize_4bit.py::test_one_graph_for_all_weights_of_a_shape[nf4-nested-torch.bfloat16]
quant/test_dequantize_4bit.py::test_another_table_is_refused_in_eager_mode_and_in_the_graph
hf/test_loading_options.py::test_dtype_holds_for_quantised_folders_too[nf4]
hf/test_loading_options.py::test_experts_are_refused_by_name
hf/test_lora_experts.py::test_one_graph_over_random_routes[gpt_oss]
hf/test_packed_experts.py::test_dense_experts_that_were_called_are_one_graph
hf/test_trl_head.py::test_one_graph
recipe/test_recipe_train.py::test_a_run_writes_what_peft_reads
training/test_recurrent_step.py::test_a_flat_graph
training/test_train_step.py::test_one_graph_and_the_losses_of_eager[llama-True-0.05-False-nf4-True-True-inductor]
training/test_train_step.py::test_one_graph_and_the_losses_of_eager[llama-True-0.0-False-nf4-True-False-whole_step]
"""


def main() -> int:
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES), flush=True)
    tests = [f"tests/python/{name}" for name in SELECTION.split()]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *tests]
    tested_here = os.environ | {"MONOGRAPH_UNTESTED_TORCH": "1"}  # compiled modes, too
    return subprocess.run(command, check=False, env=tested_here).returncode


if __name__ == "__main__":
    sys.exit(main())
