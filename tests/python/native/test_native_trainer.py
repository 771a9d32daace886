"""The native training step has the bits of TrainStep: parameters, moments, losses and norms."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.native_steps import (
    ATTENTION,
    MIXTURE,
    STACKED,
    Case,
    assert_same_bits,
    call,
    make_base,
    native_steps,
    packed,
    padded,
    python_steps,
    start,
)

NF4 = ("nf4", "--double-quant")
BF16, FP32 = torch.bfloat16, torch.float32
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def check(case: Case, folder: pathlib.Path, mode: str = "eager") -> None:
    adapter = start(case, folder / "adapter")
    want = python_steps(case, adapter, mode)
    for threads, recompute in ((1, True), (3, False)):
        got = native_steps(case, adapter, folder, threads=threads, recompute=recompute)
        assert_same_bits(got, want)


@pytest.mark.per_isa
@pytest.mark.parametrize("steps", [1, 20])
def test_llama(tmp_path: pathlib.Path, steps: int) -> None:
    base = make_base(tmp_path, "llama", NF4, BF16)
    check(Case(base, BF16, packed(steps)), tmp_path)


@pytest.mark.per_isa
@pytest.mark.parametrize(
    ("family", "dtype", "batches", "changes"),
    [
        ("mistral", BF16, packed, {"sliding_window": 7}),
        ("mistral", FP32, padded, {"sliding_window": None}),
        ("qwen2", BF16, padded, {}),
        ("qwen2", FP32, packed, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("qwen3", BF16, packed, {"tie_word_embeddings": True}),
        ("qwen3", FP32, padded, {"attention_bias": True}),
        ("llama", FP32, packed, {"attention_bias": True, "mlp_bias": True}),
        ("gemma3_text", BF16, packed, GEMMA),
        ("gemma3_text", FP32, padded, GEMMA | {"attention_bias": True, "tie_word_embeddings": False}),
        ("gemma3_text", FP32, packed, GEMMA | {"rope_parameters": {"full_attention": LINEAR}}),
        (
            "llama",
            BF16,
            packed,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_families(
    tmp_path: pathlib.Path, family: str, dtype: torch.dtype, batches: Callable[[int], Any], changes: Any
) -> None:
    base = make_base(tmp_path, family, NF4, dtype, **changes)
    check(Case(base, dtype, batches(3)), tmp_path)


@pytest.mark.per_isa
@pytest.mark.parametrize(
    ("dtype", "batches", "changes"),
    [
        (BF16, packed, {}),
        (BF16, padded, {"norm_topk_prob": False, "mlp_only_layers": [1], "num_experts_per_tok": 3}),
        (FP32, packed, {"attention_bias": True, "decoder_sparse_step": 2}),
    ],
)
def test_experts(
    tmp_path: pathlib.Path, dtype: torch.dtype, batches: Callable[[int], Any], changes: Any
) -> None:
    base = make_base(tmp_path, "qwen3_moe", STACKED, dtype, **(MIXTURE | changes))
    check(Case(base, dtype, batches(3), targets=ATTENTION), tmp_path)


@pytest.mark.parametrize(("dtype", "dropout"), [(BF16, 0.2), (FP32, 0.0)])
def test_experts_as_in_one_graph(tmp_path: pathlib.Path, dtype: torch.dtype, dropout: float) -> None:
    base = make_base(tmp_path, "qwen3_moe", STACKED, dtype, **MIXTURE)
    check(Case(base, dtype, packed(3, 2), dropout=dropout, targets=["q_proj", "o_proj"]), tmp_path, "graph")


@pytest.mark.parametrize(
    "to",
    [("mxfp4",), ("mxfp8",), ("nvfp4",), ("fp8-block",), ("fp4",)],
    ids=lambda to: to[0],
)
def test_formats_of_experts(tmp_path: pathlib.Path, to: Any) -> None:
    options = (*to, "--experts", "stack")
    base = make_base(tmp_path, "qwen3_moe", options, BF16, **(MIXTURE | {"moe_intermediate_size": 128}))
    check(Case(base, BF16, packed(2), targets=ATTENTION), tmp_path)


@pytest.mark.per_isa
@pytest.mark.parametrize(
    "to",
    [("mxfp4",), ("mxfp8",), ("nvfp4",), ("fp8-block",), ("int4", "--asymmetric"), ("int8",), ("fp4",), None],
    ids=lambda to: to[0] if to else "bf16",
)
def test_formats(tmp_path: pathlib.Path, to: Any) -> None:
    base = make_base(tmp_path, "llama", to, BF16, intermediate_size=256)
    check(Case(base, BF16, packed(2)), tmp_path)


def test_a_base_in_another_type_than_the_step(tmp_path: pathlib.Path) -> None:
    base = make_base(tmp_path, "qwen3", NF4, BF16)
    check(Case(base, FP32, padded(2)), tmp_path)


@pytest.mark.parametrize(("micro_batches", "leaves"), [(5, None), (5, 3), (2, 4)])
def test_micro_batches_are_summed_in_the_same_tree(
    tmp_path: pathlib.Path, micro_batches: int, leaves: int | None
) -> None:
    base = make_base(tmp_path, "llama", NF4, BF16)
    check(Case(base, BF16, packed(2, micro_batches), leaves=leaves), tmp_path)


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_dropout(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    base = make_base(tmp_path, "qwen2", NF4, dtype)
    check(Case(base, dtype, packed(3, 2), dropout=0.2), tmp_path)


def test_some_projections(tmp_path: pathlib.Path) -> None:
    base = make_base(tmp_path, "qwen3", NF4, BF16)
    check(Case(base, BF16, packed(3), rank=5, targets=["q_proj", "v_proj", "down_proj"]), tmp_path)


def test_layers_of_other_ranks(tmp_path: pathlib.Path) -> None:
    """Layers computed again share their room, whatever their ranks."""
    base = make_base(tmp_path, "llama", NF4, BF16)
    ranks = {r"layers\.1\.mlp\.down_proj": 24, r"layers\.1\.self_attn\.q_proj": 3}
    check(Case(base, BF16, packed(2), rank=5, rank_pattern=ranks), tmp_path)


GRAPHS = [
    ("llama", {}, BF16, 0.0),
    ("mistral", {"sliding_window": 7}, BF16, 0.2),
    ("qwen2", {}, FP32, 0.0),
    ("qwen3", {"tie_word_embeddings": True}, BF16, 0.0),
    ("qwen3", {"tie_word_embeddings": True}, BF16, 0.2),
    ("gemma3_text", GEMMA, BF16, 0.2),
    ("gemma3_text", GEMMA, FP32, 0.0),
]


@pytest.mark.parametrize(("family", "changes", "dtype", "dropout"), GRAPHS)
def test_as_in_one_graph(
    tmp_path: pathlib.Path, family: str, changes: Any, dtype: torch.dtype, dropout: float
) -> None:
    base = make_base(tmp_path, family, NF4, dtype, **changes)
    check(Case(base, dtype, packed(3, 2), dropout=dropout), tmp_path, "graph")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"new_key": 1}, ["new_key", "is not a key that the native trainer knows"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "wanted silu"]),
        ("llama", {"attention_dropout": 0.1}, ["attention_dropout is 0.1", "wanted 0"]),
        ("llama", {"model_type": "gemma3"}, ["model_type is 'gemma3'", "qwen3"]),
        ("llama", {"num_hidden_layers": 3}, ["has no model.layers.2."]),
        ("llama", {"num_hidden_layers": 1}, ["model.layers.1.", "has no place"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, ["rope_type is 'yarn'"]),
        ("llama", {"head_dim": 16}, ["q_proj.weight is [128, 128], wanted [64, 128]"]),
        ("mistral", {"sliding_window": "a"}, ["sliding_window is 'a'"]),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0, wanted null"]),
        ("gemma3_text", {"rope_parameters": {"new": {}}}, ["rope_parameters: new is not a key"]),
        ("gemma3_text", {"model_type": "qwen3"}, ["rope_parameters: rope_theta is missing"]),
        ("llama", {"tie_word_embeddings": True}, ["has lm_head.weight", "tie_word_embeddings"]),
        ("llama", {"max_position_embeddings": 0}, ["max_position_embeddings is 0, wanted a whole number"]),
        (
            "llama",
            {"quantization_config": {"transform_config": {"config_groups": {}}}},
            ["quantization_config.transform_config is set, wanted none"],
        ),
    ],
)
def test_refusals(tmp_path: pathlib.Path, family: str, changes: Any, words: list[str]) -> None:
    base = make_base(tmp_path, family, NF4, BF16)
    case = Case(base, BF16, packed(1))
    adapter = start(case, tmp_path / "adapter")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AssertionError) as caught:
        native_steps(case, adapter, tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok is 7, wanted at most the experts, 6"]),
        ({"output_router_logits": True}, ["output_router_logits is true, wanted false"]),
        ({"use_sliding_window": True}, ["use_sliding_window is true"]),
        ({"mlp_only_layers": [2]}, ["mlp_only_layers is 2, wanted a list of numbers of layers"]),
        ({"mlp_only_layers": [1]}, ["has no model.layers.1.mlp.gate_proj.weight"]),
        ({"num_experts": 5}, ["num_experts is 5, wanted the same as num_local_experts"]),
        ({"num_local_experts": 5}, ["mlp.gate.weight is [6, 128], wanted [5, 128]"]),
        ({"moe_intermediate_size": 32}, ["gate_up_proj is [6, 128, 128], wanted [6, 64, 128]"]),
        ({"shared_expert_intermediate_size": 32}, ["shared_expert_intermediate_size is not a key"]),
    ],
)
def test_refusals_of_experts(tmp_path: pathlib.Path, changes: Any, words: list[str]) -> None:
    base = make_base(tmp_path, "qwen3_moe", STACKED, BF16, **MIXTURE)
    case = Case(base, BF16, packed(1), targets=ATTENTION)
    adapter = start(case, tmp_path / "adapter")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AssertionError) as caught:
        native_steps(case, adapter, tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "to", [None, NF4, (*NF4, "--experts", "separate")], ids=["dense", "plain", "separate"]
)
def test_experts_that_are_no_packed_stacks_are_refused(tmp_path: pathlib.Path, to: Any) -> None:
    base = make_base(tmp_path, "qwen3_moe", to, BF16, **MIXTURE)
    case = Case(base, BF16, packed(1), targets=ATTENTION)
    adapter = start(case, tmp_path / "adapter")
    with pytest.raises(AssertionError, match=r"has no .*gate_up_proj; wanted experts in stacks"):
        native_steps(case, adapter, tmp_path)


def test_lora_on_experts_is_refused(tmp_path: pathlib.Path) -> None:
    base = make_base(tmp_path, "qwen3_moe", STACKED, BF16, **MIXTURE)
    case = Case(base, BF16, packed(1))  # "all-linear", which has the experts
    adapter = start(case, tmp_path / "adapter")
    with pytest.raises(AssertionError, match=r"target_parameters names \w+, wanted none"):
        native_steps(case, adapter, tmp_path)


def test_what_another_kernel_would_compute_is_refused(tmp_path: pathlib.Path) -> None:
    dense = make_base(tmp_path, "llama", None, BF16)
    some = Case(dense, BF16, packed(1), targets=["q_proj"])
    adapter = start(some, tmp_path / "some")
    with pytest.raises(AssertionError, match="k_proj is not packed and has no LoRA"):
        native_steps(some, adapter, tmp_path)
    all_of_it = Case(dense, FP32, packed(1))
    adapter = start(all_of_it, tmp_path / "all")
    with pytest.raises(AssertionError, match="is not packed and the type of the model is float32"):
        native_steps(all_of_it, adapter, tmp_path)


@pytest.mark.parametrize("name", ["use_dora", "lora_bias", "fan_in_fan_out"])
def test_what_is_no_lora_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    base = make_base(tmp_path, "llama", NF4, BF16)
    case = Case(base, BF16, packed(1))
    adapter = start(case, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {name: True}))
    with pytest.raises(AssertionError, match=rf"{name} is true|magnitude|lora_bias"):
        native_steps(case, adapter, tmp_path)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: pathlib.Path) -> None:
    base = make_base(tmp_path, "llama", NF4, BF16)
    case = Case(base, BF16, packed(1))
    adapter = start(case, tmp_path / "adapter")
    case.batches[0][0]["input_ids"][0, 3] = 256
    with pytest.raises(AssertionError, match=r"token 256: the embedding of .* has 256 rows"):
        native_steps(case, adapter, tmp_path)


def test_the_program_wants_its_arguments() -> None:
    with pytest.raises(AssertionError):
        call("only one")
