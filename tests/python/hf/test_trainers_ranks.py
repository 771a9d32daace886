"""Trainers of transformers and TRL on two gloo ranks: packed weights have the bits of one process."""

import pytest

import monograph as mg
from support.rank_trainers import LONG
from support.run_ranks import run_ranks
from support.tiny_models import tiny_llama
from support.tiny_moe import save_tiny
from support.trl_runs import make_folder

pytestmark = pytest.mark.slow


def save_large(root):
    """Packed bytes of many pages, 3 MiB."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4}
    tiny_llama(**sizes).save_pretrained(root / "dense")
    mg.from_pretrained(root / "dense", mg.MonographConfig("nf4")).save_pretrained(root / "packed")
    return str(root / "packed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found: `rank_trl.all_cases`, in one start."""
    root = tmp_path_factory.mktemp("ranks")
    experts = str(save_tiny(root / "experts", "qwen3_moe", layers=1))
    folders = str(make_folder(root)), experts, save_large(root / "large")
    return run_ranks(2, "support/rank_trl:all_cases", *folders, str(root / "out"), timeout=900)


@pytest.mark.long
def test_a_step_under_ddp_has_the_bits_of_one_process(results):
    """Both trainers, packed and padded, with and without regions and checkpointing, accumulated, experts.
    Each rank has its own micro-batch; adapters that were drawn apart are rank 0's."""
    first, second = (rank["ddp"] for rank in results)
    assert len(first) == (20 if LONG else 12)
    for found in (first, second):
        for name, case in found.items():
            assert case["differs"] == [], name
            assert case["order"], name
            assert case["broadcast"], name
            assert case["drawn_apart"], name
            if "regions=True" in name:
                assert case["regions"] == 2, name
    assert [case["loss"] for case in first.values()] == [case["loss"] for case in second.values()]


def test_every_option_of_ddp(results):
    for rank in results:
        assert len(rank["options"]) == (9 if LONG else 4)
        for name, case in rank["options"].items():
            assert case == {"differs": [[], []], "broadcast": True}, name


def test_a_base_stays_mapped_under_ddp(results):
    """DDP writes to all of a mapped base when it is made, and to none of one that is shared."""
    for number, rank in enumerate(results):
        found = rank["bases"]
        assert found["packed"] > 2**20
        assert found["kept"] >= found["packed"]
        assert found["grown False"] > 0.9
        assert found["grown True"] < 0.3  # buckets and hooks of the adapter
        assert found["bytes"]  # all 256 codes of rank 0, on both ranks
        other = f"{found['name']}.values differs between rank {number} and rank {1 - number}"
        assert found["refused"].startswith(f"share_base: {other}")


def test_losses_and_metrics_of_sft_are_those_of_its_own_head(results):
    """Padded rows of different lengths: ranks have different numbers of targets. TRL's own head and PEFT's
    own layers compute in other orders."""
    for rank in results:
        runs = rank["runs"]
        for tokens in (True, False):
            theirs, ours = (runs[f"tokens={tokens} ours={ours}"] for ours in (False, True))
            assert ours["mean"] == theirs["mean"]  # the same adapter in each
            assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-3)
            for step, (got, want) in enumerate(zip(ours["log"], theirs["log"], strict=True)):
                for key, value in want.items():
                    assert got[key] == pytest.approx(value, rel=1e-4 if step == 0 else 1e-2), (tokens, key)
        assert runs["tokens=True ours=True"]["log"][0]["loss"] == pytest.approx(ours["mean"], rel=1e-4)
        # The mean of the ranks' own means is another number: ranks have different numbers of targets.
        assert runs["tokens=False ours=True"]["log"][0]["loss"] != pytest.approx(ours["mean"], rel=1e-4)


def test_a_checkpoint_of_two_ranks_resumes_with_its_bits(results):
    for rank in results:
        whole, again = rank["runs"]["resume"]["losses"]
        assert again == whole
        assert len(set(whole)) == 4
        assert rank["runs"]["resume"]["same"]
        assert rank["runs"]["resume"]["ranks"]


def test_fsdp_that_accelerate_does_not_heed_is_said(results):
    wanted = "FSDP was asked for and DDP runs: accelerate does not shard on cpu, and each of 2 ranks holds"
    for rank in results:
        found = rank["runs"]["fsdp"]
        assert found["before"] == []
        assert len(found["warned"]) == 1
        assert wanted in found["warned"][0]
        assert len(found["notes"]) == 1
        assert found["notes"][0].startswith(wanted)
        assert f"note            {wanted}" in found["said"]
        assert found["graphs"] == 1
        assert found["ddp"]


def test_trainers_on_accelerates_fsdp2(results):
    """accelerate makes a unit of the head. It has hooks, so TRL's own head computes it, in another order."""
    for rank in results:
        assert rank["fsdp2"]["hf"]["differs"] == []
        for kind, found in rank["fsdp2"].items():
            assert found["distance"] < 2**-16, kind
            assert found["share"] == 0.5, kind
            assert found["unmoved"], kind
