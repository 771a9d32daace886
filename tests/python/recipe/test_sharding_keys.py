"""Keys of shards and of FSDP: what they mean here, and what is refused."""

import pytest

from monograph.recipe import check_keys
from monograph.recipe.config.placement import sharding_of
from support.recipe_files import errors_of

FSDP_2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "offload_params": False,
        "cpu_ram_efficient_loading": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
        "fsdp_sync_module_states": True,
    },
}


def test_what_fsdp_means_here_is_done(good):
    """axolotl's keys of FSDP, new and old, shard over all ranks; without any of it ranks map the base."""
    old = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}
    for change in (FSDP_2, old, {"fsdp": "full_shard auto_wrap"}, {"fsdp": True}):
        read = check_keys(good | change)
        assert sharding_of(read.recipe, 8) == (8, 1)
        assert [notice.split(":")[0] for notice in read.notices] == ["fsdp"]
    assert sharding_of(check_keys(good | FSDP_2 | {"dp_replicate_size": 2}).recipe, 8) == (4, 2)
    alone = check_keys(good | {"fsdp_version": 2})
    assert sharding_of(alone.recipe, 8) == (1, 8)
    assert alone.notices == [
        "fsdp_version: ignored; without fsdp_config nothing is sharded: write shard_size"
    ]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"fsdp": "shard_grad_op"}, "write full_shard, or reshard_after_forward: true"),
        ({"fsdp": ["hybrid_shard"]}, "write shard_size (ranks that share one copy) and replicate_size"),
        ({"fsdp": ["stage3"]}, "fsdp is stage3, wanted full_shard"),
        ({"fsdp_version": 3}, "fsdp_version is 3, wanted 2"),
        (
            {"fsdp_config": {"offload_params": "all"}},
            "fsdp_config.offload_params is all, wanted true or false",
        ),
        ({"fsdp_config": {"reshard_after_forward": False}}, "gathered layers are never kept"),
        ({"fsdp_config": {"reshard_after_forward": 4}}, "reshard_after_forward is 4, wanted true"),
        ({"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "the units are the decoder layers"),
        ({"fsdp_config": {"min_num_params": 100}}, "the units are the decoder layers"),
        ({"fsdp_config": {"mixed_precision_policy": "fp16"}}, "bf16 and fp16 mean bf16; leave it out"),
        ({"fsdp_config": {"reshard": True}}, "fsdp_config.reshard: unknown; known are"),
        ({"fsdp_config": {"sharding_strategy": ["FULL_SHARD"]}}, "wanted FULL_SHARD"),
        ({"fsdp": True, "shard_size": 1}, "leave one of the two out"),
        ({"shard_size": 0}, "shard_size is 0, wanted 1 or more"),
        ({"deepspeed": "other.json"}, "write shard_size to cut the base among ranks"),
    ],
)
def test_what_fsdp_cannot_mean_here_is_refused_by_name(change, part, good):
    (message,) = errors_of(good | change)
    assert part in message


def test_shard_size_times_replicate_size_is_the_world(good):
    def of(ranks, **change):
        return sharding_of(check_keys(good | change).recipe, ranks)

    assert of(8) == (1, 8)
    assert of(1) == (1, 1)
    assert of(8, shard_size=2) == of(8, dp_shard_size=2) == (2, 4)
    assert of(8, replicate_size=2) == of(8, shard_size=4, replicate_size=2) == (4, 2)
    with pytest.raises(ValueError, match=r"shard_size is 2, and WORLD_SIZE is 3, wanted a multiple of 2"):
        of(3, shard_size=2)
    with pytest.raises(ValueError, match=r"2 and replicate_size 2: 4 processes, and WORLD_SIZE is 8; wanted"):
        of(8, shard_size=2, replicate_size=2)


def test_the_way_the_base_is_held_is_no_part_of_a_run(good, tmp_path):
    """Bits do not depend on it, so that a run may be resumed on other ranks."""
    from monograph.recipe.run.run_identity import run_identity

    (tmp_path / "train.jsonl").write_text("{}")
    plain = run_identity(check_keys(good).recipe)
    assert run_identity(check_keys(good | {"shard_size": 2, "replicate_size": 3}).recipe) == plain
    assert run_identity(check_keys(good | FSDP_2).recipe) == plain
    assert run_identity(check_keys(good | {"base_memory": "3GiB"}).recipe) == plain
