"""Marks the files whose tests generate code, train or run other programs: `-m "not slow"` leaves them out.

The tests that take longest of all are marked `long`: `.ci/run long_tests` runs them, and of each kind another
one is in every run of CI.
"""

from __future__ import annotations

import os
import pathlib

import pytest

# Programs that tests start import `support` too.
_PATHS = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)

SLOW = """
bench_cases cli compiled_gradients crash default_step doctor doctor_trl elementwise_takeover experts_learn
fp16 generation loading_producers lora_plain lora_start merge nested_compile_region no_copy quant_linear
recipe_interrupted recipe_learns recipe_merge recipe_modes recipe_start recipe_train recurrent_road regions
regions_attacked regions_step router_loss safetensors_differential selftest shard train_and_merge train_step
transformers_attention trl trl_resume fully_shard trainers_ranks estimate coming_from first_run page_commands
release_tools recipe_trl_events
"""
_FILES = {f"test_{name}.py" for name in SLOW.split()}


# The beginning of FILE::NAME. Together they are two fifths of the time of all tests.
LONG = """
base_memory::test_whatever_comes_between_steps
cli::test_the_native_program_makes_the_example
compiled_gradients::test_every_gradient_is_as_near_to_float64_as_eager_modes[checkpointing-packed-packed_head-whole_step]
experts_learn::test_train_merge_generate[gpt_oss]
fully_shard::test_gradients_on_two_ranks_and_what_people_call
offload_graph::test_a_checkpointed_step_as_inductors_graph
quant_linear::test_one_graph_with_checkpointing_and_dynamic_lengths_q9[fp4
quant_linear::test_one_graph_with_checkpointing_and_dynamic_lengths_q9[fp8-block
quant_linear::test_one_graph_with_checkpointing_and_dynamic_lengths_q9[mxfp4
quant_linear::test_one_graph_with_checkpointing_and_dynamic_lengths_q9[mxfp8
quant_linear::test_one_graph_with_checkpointing_and_dynamic_lengths_q9[nf4-True-True-inductor]
ranks_killed::test_a_killed_rank_changes_nothing[in save-0]
recipe_device::test_on_a_stand_in_for_an_accelerator
recipe_interrupted::test_a_compiled_run_resumes_to_the_same_bits
recipe_learns::test_it_learns_on_a_base_in_each_format[fp8-block]
recipe_learns::test_it_learns_on_a_base_in_each_format[mxfp8]
recipe_learns::test_it_learns_on_a_base_in_each_format[nvfp4]
recipe_learns::test_the_loss_curve_is_that_of_the_peers_within_noise
recipe_modes::test_every_mode_trains_without_a_break_to_the_losses_of_eager[inductor_whole_step]
recipe_over_ranks::test_torchrun_restarts_a_killed_rank_and_the_run_goes_on
shard::test_sharded_steps_are_graphs_that_keep_local_shards
shard_loading::test_a_rank_reads_its_own_bytes_and_keeps_nothing_else
step_over_ranks::test_any_number_of_ranks_gives_one_hash[2]
train_step::test_inductor_trains_as_eager_does
train_step::test_one_graph_and_the_losses_of_eager_q9[gemma3-True-0.05-True-mxfp4-False-True-inductor_whole_step]
train_step::test_one_graph_and_the_losses_of_eager_q9[mistral-True-0.0-False-fp8-block-False-True-inductor]
train_step::test_one_graph_and_the_losses_of_eager_q9[qwen3
train_step::test_per_layer_mode_trains_the_same
trainers_ranks::test_a_step_under_ddp_has_the_bits_of_one_process
transformers_attention::test_a_mask_with_holes_is_refused_inside_a_graph[True-inductor]
tree::test_the_bits_are_those_of_the_recursion[2]
"""
_LONG = tuple(f"test_{line}" for line in LONG.strip().splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in _FILES:
            item.add_marker("slow")
        if f"{item.path.stem}::{item.name}".startswith(_LONG):
            item.add_marker("long")
