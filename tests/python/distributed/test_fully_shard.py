"""torch's `fully_shard` per decoder layer over packed weights: the bits of the model that is not sharded."""

import pytest

from support.run_ranks import run_ranks
from support.tiny_moe import save_tiny

pytestmark = pytest.mark.slow


def found_on(ranks, tmp_path):
    experts = save_tiny(tmp_path / "experts", "qwen3_moe", layers=1)
    results = run_ranks(ranks, "support/rank_fully_shard:all_cases", str(experts), str(tmp_path), timeout=600)
    for rank in results:
        for name, case in rank["cases"].items():
            assert case["differs"] == [], name
    for name in results[0]["cases"]:  # the ranks' parts of the packed bytes are all of them, and alike
        shares = [rank["cases"][name]["share"] for rank in results]
        assert sum(shares) == pytest.approx(1), name
        assert max(shares) < 1 / ranks + 0.05, name
    return results


@pytest.mark.long
def test_gradients_on_two_ranks_and_what_people_call(tmp_path):
    """Seven formats, double quantisation, odd shapes; checkpointing, layers compiled one by one, regions,
    DoRA, a packed head, mixed precision, packed experts, units within layers, accelerate's own road."""
    results = found_on(2, tmp_path)
    assert len(results[0]["cases"]) == 19
    for rank in results:
        said = rank["calls"]
        part = "ValueError: dequantize: the packed bytes are a DTensor of shape [64, 32] over 2 ranks, wanted"
        for call in ("dequantize", "weight", "merge", "unload"):
            assert said[call].startswith(part), call
        for call in ("TrainStep", "doctor"):
            assert said[call].startswith(
                f"ValueError: {call}: base_model.model.model.embed_tokens.weight is a DT"
            )
            assert "monograph.shard(model, mesh)" in said[call]
        assert "layers.0 has a forward or hooks of somebody else" in said["regions"]
        assert "undo regions before fully_shard" in said["undo"]
        assert said["unsharded"]  # after `layer.unshard()`
        assert said["save"].startswith(
            "RuntimeError"
        )  # PEFT's, without a state dict: nothing wrong is written
        assert said["from state"]


@pytest.mark.long
def test_gradients_on_three_ranks_of_uneven_parts(tmp_path):
    assert len(found_on(3, tmp_path)[0]["cases"]) == 4


@pytest.mark.long
def test_layers_compiled_with_inductor():
    for rank in run_ranks(2, "support/rank_fully_shard:inductor_cases", timeout=900):
        assert {name: case["differs"] for name, case in rank.items()} == {"double": [], "mxfp4": []}
