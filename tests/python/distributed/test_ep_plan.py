"""Formulas of expert_plan.py against routes that are drawn and counted, and what plan and estimate say."""

from __future__ import annotations

import json
from math import sqrt

import pytest
import torch
from transformers import Qwen3MoeConfig

from monograph.cli.estimate import estimate
from monograph.cli.plan_ranks import main
from monograph.distributed.expert_plan import Experts
from monograph.distributed.expert_routes import ExpertRoutes
from monograph.distributed.plan import Mesh

TOKENS = 4000


@pytest.mark.parametrize(("count", "chosen", "ranks"), [(12, 4, 3), (12, 4, 4), (10, 4, 3), (128, 8, 8)])
def test_rows_and_slots_are_those_of_even_routes(count, chosen, ranks):
    """Within four standard deviations: a token's numbers lie in [0, n] and [0, k]."""
    experts = Experts(1, count, chosen, 1, 1, 1, 1)
    generator = torch.Generator().manual_seed(count)
    rows = slots = 0
    for home in range(ranks):
        ids = torch.rand(TOKENS, count, generator=generator).topk(chosen).indices
        parts = ExpertRoutes.of(ids, ranks, count).parts
        rows += sum(len(part.tokens) for rank, part in enumerate(parts) if rank != home)
        slots += sum(len(part.slots) for rank, part in enumerate(parts) if rank != home)
    drawn = ranks * TOKENS
    assert abs(rows / drawn - experts.ranks_of_a_token(ranks)) < 4 * ranks / 2 / sqrt(drawn)
    assert abs(slots / drawn - experts.slots_of_a_token(ranks)) < 4 * chosen / 2 / sqrt(drawn)


def test_formulas_by_hand():
    experts = Experts(layers=3, count=10, chosen=2, hidden=64, float_bytes=2, nbytes=1001, trained=600)
    assert experts.owned(3) == [3, 3, 4]
    assert experts.held_bytes(3) == 401
    assert experts.held_bytes(1) == 1001
    # Of 45 pairs 21 have no expert of three, 15 none of four.
    d = (2 * (1 - 21 / 45) + (1 - 15 / 45)) * 2 / 3
    assert experts.ranks_of_a_token(3) == pytest.approx(d)
    row = 3 * 64 * 2
    assert experts.sent_for_a_token(3) == pytest.approx((3 * d + 2 * 2 * 2 / 3) * row)
    assert experts.sent_for_a_token(3, forwards=2) == pytest.approx((4 * d + 3 * 2 * 2 / 3) * row)
    assert experts.each_slot_alone(3) == pytest.approx(5 * 2 * 2 / 3 * row)
    assert experts.each_slot_alone(3, forwards=2) == pytest.approx(7 * 2 * 2 / 3 * row)
    assert [experts.held_factors(ranks) for ranks in (1, 2, 3)] == [600, 300, 240]
    assert experts.sent_for_a_token(1) == experts.buffer_bytes(1, 9) == 0
    assert experts.sent_for_a_token(10) <= experts.each_slot_alone(10)
    with pytest.raises(
        ValueError, match="expert_parallel_size is 11, wanted 1 to 10, the experts of a layer"
    ):
        experts.owned(11)
    with pytest.raises(ValueError, match="expert_parallel_size is 3, wanted a divisor of 8, the ranks"):
        Mesh(8, 8, 3)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    counts = {"num_hidden_layers": 2, "num_experts": 10, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**sizes, **heads, **counts, tie_word_embeddings=False).save_pretrained(folder)
    return str(folder / "config.json")


def test_the_plan_counts_experts_once(config, capsys):
    found = {}
    for ranks in (1, 2):
        words = ["--ranks", "2", "--shard-size", "2", "--expert-parallel-size", str(ranks), "--tokens", "64"]
        assert main([config, *words, "--json"]) == 0
        found[ranks] = json.loads(capsys.readouterr().out)
    held = {ranks: plan["memory_bytes"] for ranks, plan in found.items()}
    # Half of the experts and half of the rest, as when both are cut.
    both = held[2]["shard"] + held[2]["experts"]
    assert abs(both - held[1]["shard"]) < 256  # each piece of a row begins at a multiple of 16 bytes
    (sent,) = [c for c in found[2]["collectives"] if c["what"] == "experts"]
    assert sent["calls"] == 2
    gathers = {
        r: sum(c["moved"] for c in p["collectives"] if c["operator"] == "all_gather")
        for r, p in found.items()
    }
    assert gathers[2] < gathers[1]
    assert main([config, "--ranks", "2", "--expert-parallel-size", "2"]) == 0
    assert "MB a token with even routes" in capsys.readouterr().out
    assert main([config, "--ranks", "16", "--expert-parallel-size", "16"]) == 2
    assert "wanted 1 to 10, the experts of a layer" in capsys.readouterr().err


def test_estimate_has_one_owners_experts(config):
    options = {"format_name": "nf4", "double_quant": True, "rank": 4, "tokens": 32, "checkpointing": True}
    whole, spread = (estimate(config, **options, expert_ranks=ranks) for ranks in (1, 3))
    assert "experts" not in whole
    each = (whole["base"] - spread["base"]) / 10
    assert spread["experts"] == pytest.approx(4 * each, abs=1)
    assert spread["exchange"] > 0
    # 2 layers, 10 experts of which 4 are here, rank 4 on down and 8 on gate and up.
    factors = 2 * 4 * (4 * (64 + 128) + 8 * (128 + 2 * 64))
    assert whole["adapter"] - spread["adapter"] == 6 * factors
    assert whole["moments"] - spread["moments"] == 2 * 6 * factors
