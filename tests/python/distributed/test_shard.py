"""mg.shard on 2, 3 and 4 ranks: the bits of whole models; gathers and what is kept counted in graphs."""

import pytest
import torch

import monograph as mg
from monograph.distributed import World, shard_group_of
from support import tiny_moe
from support.run_ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with experts, which are quantised while they load."""
    made = tmp_path_factory.mktemp("experts")
    for family in ("qwen3_moe", "gpt_oss"):
        tiny_moe.save_tiny(made / family, family, dtype=torch.bfloat16)
    return str(made)


@pytest.mark.parametrize(("ranks", "cases"), [(2, "formats_and_models"), (3, "odd_ranks")])
def test_sharded_models_have_the_bits_of_whole_ones(ranks, cases, folder):
    assert run_ranks(ranks, f"support/sharded_cases:{cases}", folder) == ["done"] * ranks


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "cases"), [(2, "graphs_of_two"), (4, "four_ranks")])
def test_sharded_steps_are_graphs_that_keep_local_shards(ranks, cases):
    assert run_ranks(ranks, f"support/sharded_cases:{cases}") == ["done"] * ranks


@pytest.mark.long
def test_the_modes_with_generated_code_gather_again_in_backward():
    assert run_ranks(2, "support/sharded_cases:flat_graphs", timeout=900) == ["done"] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "checkpointing"), [("inductor", False), ("inductor_whole_step", True), ("per_layer", False)]
)
def test_inductors_code_over_shards_has_the_bits_of_its_code_for_whole_models(mode, checkpointing):
    assert run_ranks(2, "support/sharded_cases:inductor", mode, checkpointing, timeout=900) == ["done"] * 2


def test_one_rank_keeps_its_model():
    from support import sharded_cases

    model = sharded_cases.llama(layers=1)
    assert mg.shard(model, World()) is model
    assert shard_group_of(model) is None
