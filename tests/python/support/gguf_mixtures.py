"""What holds for a mixture of experts from a GGUF file alone, whatever its family."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.nn import PackedExperts
from monograph.training import TrainStep
from support.gguf_bases import rewrite

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
EXPERTS = ("gate_up_proj", "down_proj")
TARGETS = [f"mlp.experts.{name}" for name in EXPERTS]


def layers_of(model: torch.nn.Module) -> dict[str, PackedExperts]:
    return {path: m for path, m in model.named_modules() if isinstance(m, PackedExperts)}


def adapted(source: Any, **options: Any) -> Any:
    """With LoRA on all linear layers and experts."""
    torch.manual_seed(0)
    model = mg.from_pretrained(source, **options)
    return mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear"), experts=True)


def changed(file: pathlib.Path, kinds: Mapping[str, str]) -> pathlib.Path:
    """The file with other types for some tensors."""
    blocks = {}
    for tensor in gguf.GGUFReader(file).tensors:
        kind = kinds.get(tensor.name)
        if kind is not None:
            values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
            blocks[tensor.name] = (
                kind,
                gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()]),
            )
    made = file.parent / "changed.gguf"
    rewrite(file, made, blocks)
    return made


def check_gradients(file: pathlib.Path, wanted: Any) -> None:
    """Against transformers' own experts on the decoded weights, with PEFT's W + B A, float32."""
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], target_parameters=TARGETS)
    found = []
    for model in (mg.from_pretrained(file, dtype=torch.float32), wanted):
        torch.manual_seed(0)
        tuned = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(2)
        for name, p in tuned.named_parameters():
            if "lora_" in name:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)
        loss = tuned(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found.append(
            {"loss": loss.detach()} | {n: p.grad for n, p in tuned.named_parameters() if p.requires_grad}
        )
        tuned.unload()
    ours, theirs = found
    assert len(ours) == 1 + 2 * 2 * 4
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        assert (one - theirs[key]).norm() <= 1e-3 * theirs[key].norm(), key


def check_one_graph_and_one_adapter(sources: Sequence[tuple[Any, dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Of the file and of its decoded folder, with their options; gives the file's adapter."""
    trained, losses = [], []
    for source, options in sources:
        model = adapted(source, **options)
        step = TrainStep(model)
        losses.append([step([BATCH], 5e-3).loss.item() for _ in range(4)])
        report = mg.doctor(model, [BATCH, BATCH])
        assert not [*report.breaks, *report.recompiles, *report.weight_copies]
        trained.append({name: p for name, p in model.named_parameters() if p.requires_grad})
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.9 * losses[0][0]
    ours, theirs = trained
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    return ours


def check_merging_in_memory(file: pathlib.Path) -> None:
    model = adapted(file, dtype=torch.float32)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.05)
    with torch.no_grad():
        apart = model(IDS).logits
        model.merge_adapter()
        torch.testing.assert_close(model(IDS).logits, apart, rtol=1e-3, atol=2e-2)
        model.unmerge_adapter()
        assert torch.equal(model(IDS).logits, apart)
