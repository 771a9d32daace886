"""Layers of experts as transformers models them, drawn at random, and the operator's arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import monograph as mg
from monograph.ops.experts import Activation, experts
from monograph.ops.layout import plain_layout

E, H, INNER, K, RANK = 8, 64, 32, 2, 3
SCALES = (0.5, 1.5)
FAMILIES = ("qwen3_moe", "gelu", "gpt_oss", "deepseek_v4", "nemotron_h")


@dataclass
class Layer:
    module: torch.nn.Module  # in float64, on transformers' own loop over experts
    options: dict[str, Any]
    names: tuple[str, str]  # of the two weights

    @property
    def transposed(self) -> bool:
        return bool(self.options.get("transposed"))


def layer(family: str) -> Layer:
    torch.manual_seed(3)
    config: Any
    module: Any
    options: dict[str, Any]
    sizes: dict[str, Any] = {"hidden_size": H, "num_hidden_layers": 1, "num_experts_per_tok": K}
    if family in ("qwen3_moe", "gelu"):
        act = "silu" if family == "qwen3_moe" else "gelu_pytorch_tanh"
        config = Qwen3MoeConfig(**sizes, num_experts=E, moe_intermediate_size=INNER, hidden_act=act)
        kind = Activation.SILU if family == "qwen3_moe" else Activation.GELU_TANH
        module, options = Qwen3MoeExperts, {"activation": kind}
    elif family == "gpt_oss":
        config = GptOssConfig(**sizes, num_local_experts=E, intermediate_size=INNER)
        options = {"activation": Activation.GPT_OSS, "interleaved": True, "alpha": config.swiglu_alpha}
        options |= {"limit": config.swiglu_limit, "transposed": True}
        module = GptOssExperts
    elif family == "deepseek_v4":
        config = DeepseekV4Config(**sizes, n_routed_experts=E, moe_intermediate_size=INNER, swiglu_limit=4.0)
        module, options = DeepseekV4Experts, {"activation": Activation.CLAMPED_SILU, "limit": 4.0}
    else:
        config = NemotronHConfig(**sizes, n_routed_experts=E)
        config.moe_intermediate_size, config.num_experts_per_tok, config.moe_latent_size = INNER, K, None
        module, options = NemotronHExperts, {"activation": Activation.RELU_SQUARED}
    config._experts_implementation = "eager"
    made = module(config).double()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    return Layer(made, options, (first, "down_proj"))


def routes(tokens: int, seed: int = 0, outside: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and float32 weights. The last expert gets no token; with `outside` some slots go nowhere."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, E - 1, generator=generator)
    weights, ids = torch.topk(scores, K)
    if outside:
        nowhere = torch.rand(tokens, K, generator=generator) < 0.3
        ids = torch.where(nowhere, torch.tensor([-1, E, 2**40, -(2**40)])[ids % 4], ids)
    return ids, weights


def factors(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a [r E, cols] and b [rows, r E] in float32, as PEFT has them."""
    return torch.randn(RANK * E, cols) * 0.1, torch.randn(rows, RANK * E) * 0.1


def delta(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[E, rows, cols] of PEFT's factors: its einsum."""
    a = a.reshape(E, RANK, -1)
    return torch.einsum("o r e, e r i -> e o i", b.reshape(b.shape[0], RANK, E), a) * scale


def stack(weight: torch.Tensor, format: str, transposed: bool) -> tuple[tuple[Any, ...], torch.Tensor]:
    """(values, scales, layout) of a dense [E, out, in], and what those hold in float64."""
    if format == "plain":
        values = weight.transpose(1, 2).contiguous() if transposed else weight
        return (values, [], plain_layout(values.shape)), weight.double()
    packed = mg.quantize(weight, format, double_quant=format == "nf4")
    return (packed.values, list(packed.scales), packed.layout), packed.dequantize(weight.dtype).double()


class Case:
    """One call of the operator and the same in float64 by transformers' module."""

    def __init__(
        self, family: str, format: str, dtype: torch.dtype, tokens: int = 23, outside: bool = False
    ) -> None:
        self.layer = layer(family)
        self.options = dict(self.layer.options)
        if format != "plain":
            self.options.pop("transposed", None)
        own = {name: p.detach() for name, p in self.layer.module.named_parameters()}
        first, second = (own[name].to(dtype) for name in self.layer.names)
        if self.layer.transposed:
            first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
        plain = bool(self.options.get("transposed"))
        (self.first, self.dense1), (self.second, self.dense2) = (
            stack(weight, format, plain) for weight in (first, second)
        )
        self.ids, self.weights = routes(tokens, outside=outside)
        self.leaves = {
            "x": torch.randn(tokens, H).to(dtype),
            "weights": self.weights,
            **dict(zip(("a1", "b1"), factors(*first.shape[1:]), strict=True)),
            **dict(zip(("a2", "b2"), factors(*second.shape[1:]), strict=True)),
        }
        if "gate_up_proj_bias" in own:
            self.leaves |= {"bias1": own["gate_up_proj_bias"].to(dtype)}
            self.leaves |= {"bias2": own["down_proj_bias"].to(dtype)}
        self.dy = torch.randn(tokens, H).to(dtype)

    def operator(self, leaves: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
        return experts(
            leaves["x"],
            more.pop("ids", self.ids),
            leaves["weights"],
            more.pop("first", self.first),
            more.pop("second", self.second),
            bias=(leaves.get("bias1"), leaves.get("bias2")),
            lora1=(leaves["a1"], leaves["b1"], SCALES[0]),
            lora2=(leaves["a2"], leaves["b2"], SCALES[1]),
            **self.options,
            **more,
        )

    def reference(self, leaves: dict[str, torch.Tensor], dense: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """transformers' loop on W + scale B A; slots outside weigh nothing, at an expert that exists."""
        weights = [
            w + delta(leaves[a], leaves[b], scale)
            for w, a, b, scale in zip(dense, ("a1", "a2"), ("b1", "b2"), SCALES, strict=True)
        ]
        if self.layer.transposed:
            weights = [w.transpose(1, 2) for w in weights]
        parameters = dict(zip(self.layer.names, weights, strict=True))
        if "bias1" in leaves:
            parameters |= {"gate_up_proj_bias": leaves["bias1"], "down_proj_bias": leaves["bias2"]}
        inside = (self.ids >= 0) & (self.ids < E)
        routed = (torch.where(inside, self.ids, 0), torch.where(inside, leaves["weights"], 0.0))
        return torch.func.functional_call(self.layer.module, parameters, (leaves["x"], *routed))


def run(function: Any, leaves: dict[str, torch.Tensor], dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y and the gradient of every leaf."""
    own = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    y = function(own)
    gradients = torch.autograd.grad(y, list(own.values()), dy)
    return {"y": y.detach(), **dict(zip(own, gradients, strict=True))}
