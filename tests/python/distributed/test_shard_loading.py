"""Two ranks load a folder of 70 MB, each its own bytes; and what `doctor` says about the sharded model.

`python -m monograph.bench shard_memory` is the same with 4 GB on 4 ranks.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from peft import LoraConfig

import monograph as mg
from monograph.bench.large_model import write_model
from monograph.bench.shard_memory import load
from monograph.diagnosis import Gathers, Report
from monograph.distributed.layer_bytes import Layout
from monograph.distributed.shard import shard
from monograph.training.regions import make_regions
from support.run_ranks import run_ranks
from support.tiny_models import save_llama

MIB = 2**20
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
LAYERS = 6


def batches():
    ids = [torch.arange(n).reshape(1, -1) * 7 % 320 for n in (24, 40)]
    return [{"input_ids": i, "labels": i, "attention_mask": torch.ones_like(i)} for i in ids]


def adapted(folder):
    model = mg.from_pretrained(folder)
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    return mg.add_lora(model, LoraConfig(r=2, target_modules="all-linear"))


def diagnosed(world, folder):
    """The report on a flat graph, and on regions."""
    found = {}
    for kind in ("flat", "regions"):
        model = shard(adapted(folder), world)
        if kind == "regions":
            make_regions(model)
        report = mg.doctor(model, batches(), quiet=True, world=world)
        found[kind] = json.loads(report.to_json()) | {"text": str(report)}
    plain = mg.from_pretrained(folder)
    parts = [plain.model.layers[0], plain.model.layers[1], plain.model.embed_tokens, plain.lm_head]
    found["per rank"] = [Layout.of(dict(part.named_parameters()), 2).bytes_per_rank for part in parts]
    return found


def everything(world, folder, small):
    load(world, folder)  # modules that are imported on first use are read from files too
    return {"load": load(world, folder), "doctor": diagnosed(world, small)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    write_model(folder / "model", LAYERS, **SIZES)
    source = save_llama(folder / "dense", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    nf4 = mg.MonographConfig("nf4", double_quant=True)
    mg.from_pretrained(source, nf4).save_pretrained(folder / "small")
    found = run_ranks(
        2,
        "distributed/test_shard_loading:everything",
        str(folder / "model"),
        str(folder / "small"),
        timeout=600,
    )
    stored = sum(path.stat().st_size for path in pathlib.Path(folder, "model").glob("*.safetensors"))
    return found, stored


@pytest.mark.long
def test_a_rank_reads_its_own_bytes_and_keeps_nothing_else(ranks):
    found, stored = ranks
    for rank in found:
        own = rank["load"]["shard"]
        assert stored / 2 - MIB < own < stored / 2 + MIB
        # A whole copy would be 35 MB more; allocators and the modules themselves take a few.
        assert rank["load"]["grown"] < own + 12 * MIB, rank["load"]
        assert rank["load"]["highest"] < own + 16 * MIB, rank["load"]
        # By calls, not through the mapping; beside it config, headers, and the tables of /proc.
        assert own <= rank["load"]["rchar"] < 1.01 * own + 4 * MIB, rank["load"]


@pytest.mark.parametrize("kind", ["flat", "regions"])
def test_doctor_counts_one_gather_a_layer_forward_and_one_backward(ranks, kind):
    for rank in ranks[0]:
        report, per_rank = rank["doctor"][kind], rank["doctor"]["per rank"]
        assert report["holds"], report["text"]
        assert (report["graphs"], report["breaks"], report["recompiles"]) == (1, [], [])
        assert (report["ranks"], report["shard_ranks"]) == (2, 2)
        layers, ends = sorted(report["gathers"], key=lambda found: ".layers." not in found["units"][0])
        assert (len(layers["units"]), layers["forward"], layers["backward"]) == (2, 2, 2)
        assert (len(ends["units"]), ends["forward"], ends["backward"]) == (2, 2, 0)
        assert report["shard_bytes"] == sum(per_rank)
        assert report["received_bytes"] == {"forward": sum(per_rank), "backward": sum(per_rank[:2])}
        assert set(report["whole_bytes"]) >= {"trained", "buffers"}
        assert report["gradient_bytes"] == report["whole_bytes"]["trained"]
        assert any("model.norm.weight" in reason for reason in report["whole_bytes"])
        assert "gathers         2 forward (wanted 2), 2 backward" in report["text"]


def test_a_report_on_ranks_is_of_all_of_them():
    report = Report(graphs=1, ranks=2)
    assert report.holds
    assert "whole on each rank" in str(report)
    assert not Report(graphs=1, ranks=2, other_ranks=["rank 1 has 2 graphs"]).holds
    twice = Gathers(["model.layers.0"], 16, forward=2, backward=1)
    assert not Report(graphs=1, ranks=2, gathers=[twice]).holds
    assert not twice.holds
