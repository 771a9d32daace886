"""Recipes with `expert_parallel_size`: one adapter on any number of ranks, killed ones too; refusals."""

from __future__ import annotations

import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.recipe import check_keys
from monograph.recipe.config.placement import expert_ranks
from monograph.recipe.run.run_identity import run_identity
from support.dense_experts import dense_copy
from support.ep_runs import STEPS
from support.native_tool import run
from support.rank_program import EXPERT_POINTS
from support.rank_runs import results_of
from support.recipe_files import errors_of
from support.tiny_moe import tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def results(root):
    return results_of(root, "spread", "support.ep_runs")


@pytest.mark.parametrize("way", ["on 2", "on 3", "both"])
def test_the_adapter_and_the_losses_are_those_of_one_process(results, way):
    whole, found = results["whole"], results[way]
    assert whole["exits"] == [[0]]
    assert set(found["exits"][0]) == {0}, found["errors"]
    assert [step for step, loss, _ in whole["trace"] if float.fromhex(loss)] == list(range(1, STEPS + 1))
    for name in ("trace", "adapter", "base"):
        assert found[name] == whole[name] != ""
    assert whole["base"]["packed"]["experts"] is True


def test_the_file_loads_in_plain_peft_and_merges(results, root):
    assert results["on 2"]["exits"] == [[0, 0]]
    base = mg.from_pretrained(
        root / "model", mg.MonographConfig("nf4", double_quant=True), dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(dense_copy(root / "model", base), root / "on 2").eval()
    run("merge", root / "model", "--adapter", root / "on 2", "--out", root / "merged")
    merged = AutoModelForCausalLM.from_pretrained(root / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        want = plain(tokens()).logits
        with plain.disable_adapter():
            assert (plain(tokens()).logits - want).norm() > 2**-6 * want.norm()
        # bf16 keeps 8 bits of each merged weight.
        assert (merged(tokens()).logits - want).norm() <= 2**-6 * want.norm()


def test_ranks_that_it_does_not_divide_are_told(results):
    told = "expert_parallel_size is 2, and WORLD_SIZE is 3, wanted a multiple of 2"
    assert told in "".join(results["no divisor"]["errors"][0])


@pytest.mark.slow
def test_the_best_adapter_is_taken_back_by_the_owners_of_its_factors(tmp_path_factory):
    found = results_of(tmp_path_factory.mktemp("best"), "best", "support.ep_runs")
    whole = found["whole"]
    losses = {step: float.fromhex(loss) for step, _, loss in whole["trace"] if float.fromhex(loss)}
    assert list(losses) == [1, 2]
    assert losses[1] < losses[2]
    for way in ("whole", "on 2", "on 3"):
        assert set(found[way]["exits"][0]) == {0}, found[way]["errors"]
        for what in ("adapters", "optimizers"):
            assert found[way][what] == whole[what]
            assert len(set(whole[what].values())) == 2
        assert found[way]["adapter"] == whole["adapters"]["checkpoint-1"]
        assert found[way]["left over"] == []
        assert found[way]["trace"] == whole["trace"]


@pytest.mark.slow
def test_killed_ranks_are_named_and_change_nothing(tmp_path_factory):
    found = results_of(tmp_path_factory.mktemp("faults"), "faults", "support.ep_runs")
    whole = found["whole"]
    for point in EXPERT_POINTS:
        killed = found[point]
        assert killed["exits"] == [[1, -9], [0, 0]], (point, killed["exits"], killed["errors"])
        assert re.search(r"rank 1 of 2 was lost in .* of step 3: last seen", killed["errors"][0][0])
        assert killed["dealt"] == ""
    for name in (*EXPERT_POINTS, "resize"):
        for what in ("trace", "adapter"):
            assert found[name][what] == whole[what], (name, what)
    assert [-9 in codes for codes in found["resize"]["of all"]] == [True, True, True, False]


def test_the_number_of_owners_is_no_part_of_a_run(good, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    plain = run_identity(check_keys(good).recipe)
    spread = check_keys(good | {"expert_parallel_size": 4}).recipe
    assert run_identity(spread) == plain
    assert expert_ranks(spread, 8) == 4
    assert expert_ranks(check_keys(good).recipe, 8) == 1
    assert expert_ranks(check_keys(good | {"expert_parallel_size": 1}).recipe, 3) == 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0, wanted 1 or more"),
        ({"expert_parallel_token_capacity": 1.5}, "it drops tokens, and here every token is served"),
        ({"expert_parallel_backend": "deep_ep"}, "through gloo, without DeepEP"),
        ({"expert_parallel_num_nvl_bytes": 1}, "through gloo, without DeepEP"),
        ({"expert_parallel_fallback_on_unsupported": True}, "through gloo, without DeepEP"),
        ({"expert_parallel_size": 2, "base_memory": "3GiB"}, "write one of the two"),
        ({"expert_parallel_size": 2, "calibration": 2}, "leave calibration out"),
        ({"expert_parallel_size": 2, "device": "cuda"}, "leave expert_parallel_size out"),
        ({"expert_parallel_size": 2, "trainer": "trl"}, "expert_parallel_size: trainer is trl"),
    ],
)
def test_what_is_refused(change, part, good):
    assert part in "; ".join(errors_of(good | change))
