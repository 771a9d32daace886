"""LoraLinear: PEFT's LoRA layer over a QuantLinear or a frozen nn.Linear in bf16, computed by our operators.

It is PEFT's own `lora.Linear` in everything that people touch (names, state dict, adapters, scaling, dropout,
DoRA's magnitude). PEFT makes it over a QuantLinear (hf/peft); it merges right from the start and
computes as PEFT's until `monograph.optimize` fuses it. What it owns then:

    LoRA   y = x W^T + (s x A^T) B^T + bias                      one pass over W; dx likewise
    DoRA   y = g (x W^T + (s x A^T) B^T) + bias,  g = m / ||W + s B A||    the norm without a dense W

PEFT computes an fp32 adapter on a bf16 model in fp32; here the product runs in the dtype of x, with fp32
masters, as autocast does. A row of y has the same bits whatever batch it comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from monograph.hf.peft.lora_start import StartedLora
from monograph.nn.quant_linear import QuantLinear, dense_linear
from monograph.nn.row_squares import keep_row_squares
from monograph.ops.layout import plain_layout
from monograph.ops.linear import linear, plain_linear
from monograph.ops.linear_scaled import linear_scaled
from monograph.upstream.peft_names import DoraLinearVariant, caches, check_adapters_to_merge
from monograph.upstream.torch_names import hooks

_MERGED_ROWS = 256  # merged at a time, in 64 bits: 30 MB per copy for 14,336 columns


# While somebody generates: the factors of each layer, and what they were made of.
_kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] | None = None


@contextmanager
def kept_factors() -> Iterator[None]:
    """Inside, without gradients, factors are scaled and cast once and not for each token. No parameter may
    change as long as it lasts."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def rounded_once(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float64 tensor rounded to nearest even, once.

    torch goes through float32 and so rounds twice near ties. Here float32 is rounded to odd, which a second
    rounding cannot tell from the value itself (core/monograph/merge/round.h).
    """
    near = value.float()
    if dtype == torch.float32:
        return near
    bits = near.view(torch.int32)
    bits = torch.where(near.double().abs() > value.abs(), bits - 1, bits)
    bits = torch.where(near.double() != value, bits | 1, bits)
    return bits.view(torch.float32).to(dtype)


def fusible(layer: nn.Module) -> bool:
    """Whether a dense layer may be the base of the fused forward: frozen, in bf16, of nobody's making."""
    return (
        type(layer) is nn.Linear
        and layer.weight.dtype == torch.bfloat16
        and layer.weight.device.type == "cpu"
        and layer.weight.is_contiguous()
        and not layer.weight.requires_grad
    )


class LoraLinear(StartedLora):
    """See the module's first lines."""

    fused: bool = False  # whether `monograph.optimize` was called
    # PEFT's attributes; torch types what a ModuleDict holds as Tensor | Module.
    base_layer: Any
    lora_magnitude_vector: Any

    @classmethod
    def take_over(cls, layer: Any) -> None:
        """Turns PEFT's layer, or one of ours that is not fused yet, into a fused one, in place."""
        layer.__class__ = cls
        layer.is_target_conv_1d_layer = False  # PEFT's layer over bitsandbytes' does not say
        layer.fused = True
        layer._prepare_dora()

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        self._prepare_dora()

    def _prepare_dora(self) -> None:
        base = self.get_base_layer()
        if self.fused and self.lora_magnitude_vector and isinstance(base, QuantLinear):
            keep_row_squares(base)

    def _fused_adapters(self, x: torch.Tensor, options: dict[str, Any]) -> list[str] | None:
        """The active adapters if this forward is ours to compute, else None: it is PEFT's."""
        if (
            not self.fused
            or self.disable_adapters
            or self.merged
            or any(value is not None for value in options.values())
        ):
            return None
        packed = isinstance(self.base_layer, QuantLinear)
        if not packed and not (fusible(self.base_layer) and x.dtype == self.base_layer.weight.dtype):
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.has_modules_to_call(names):
            return None
        plain = all(name not in self.lora_variant for name in names)
        dora = packed and len(names) == 1 and isinstance(self.lora_variant.get(names[0]), DoraLinearVariant)
        return names if names and (plain or dora) else None

    # A graph decides it once, without a guard for each module: torch keeps to hooks of tracing time, too.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def has_modules_to_call(self, names: list[str]) -> bool:
        """Whether somebody hooked or changed a module that the fused forward reads without calling it."""
        factors = [part[name] for part in (self.lora_A, self.lora_B) for name in names]
        if any(type(factor) is not nn.Linear for factor in factors):
            return True
        if any(self.lora_A[name].bias is not None for name in names):
            return True
        read = [self.base_layer, *factors, *(self.lora_dropout[name] for name in names)]
        return any(any(hooks(module)) for module in read)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.refuse_the_bare_residual(kwargs)
        names = self._fused_adapters(x, kwargs)
        if names is None or args:
            return super().forward(x, *args, **kwargs)
        if names[0] in self.lora_variant:
            return self._dora(x, names[0])
        return self._lora(x, names)

    def factors(self, names: list[str], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """a [rank, cols] with the scaling in it, and b [rows, rank]; several adapters stand side by side."""
        if _kept is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._made_factors(names, dtype)
        key = (id(self), *names, dtype)
        if key not in _kept:
            _kept[key] = self._made_factors(names, dtype)
        return _kept[key]

    def _made_factors(self, names: list[str], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # `add_weighted_adapter` leaves factors that are transposed in memory.
        a = [(self.lora_A[name].weight * self.scaling[name]).to(dtype).contiguous() for name in names]
        b = [self.lora_B[name].weight.to(dtype).contiguous() for name in names]
        return (a[0], b[0]) if len(names) == 1 else (torch.cat(a), torch.cat(b, dim=1))

    def total_bias(self, names: list[str], dtype: torch.dtype) -> torch.Tensor | None:
        bias = self.base_layer.bias
        for name in names:
            if self.lora_bias[name]:
                own = self.lora_B[name].bias * self.scaling[name]
                bias = own if bias is None else bias + own
        return None if bias is None else bias.to(dtype)

    def drops(self, name: str) -> bool:
        return self.training and not isinstance(self.lora_dropout[name], nn.Identity)

    def _lora(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        base = self.base_layer
        bias = self.total_bias(names, x.dtype)
        a, b = self.factors(names, x.dtype)
        # The factors have the order of x; beside a weight in another one, x and a have that one.
        if isinstance(base, QuantLinear):
            packed, stored_x, stored_a = base.operands, base.permuted(x), base.permuted(a)
        else:
            packed, stored_x, stored_a = (base.weight, [], plain_layout(base.weight.shape)), x, a
        if not any(self.drops(name) for name in names):
            with torch.no_grad():
                u = plain_linear(x, a)
            return linear(stored_x, *packed, bias, u, b, stored_a)
        # Each adapter has its own mask, so that u no longer is a product of x itself.
        parts = [plain_linear(self.lora_dropout[name](x), self.factors([name], x.dtype)[0]) for name in names]
        u = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return linear(stored_x, *packed, bias, u, b)

    def _dora(self, x: torch.Tensor, name: str) -> torch.Tensor:
        base: QuantLinear = self.base_layer
        packed = base.operands
        # float32, as PEFT's: in bf16 a gain of 1.003 is 1.
        gain = self.lora_magnitude_vector[name].weight.float() / self.dora_norm(name)
        bias = self.total_bias([name], x.dtype)
        a, b = self.factors([name], x.dtype)
        if not self.drops(name):
            with torch.no_grad():
                u = plain_linear(x, a)
            y = linear_scaled(base.permuted(x), *packed, gain, u, b, base.permuted(a))
            return y if bias is None else y + bias
        # As PEFT defines it: the dropped x feeds the low-rank part and the magnitude's share of the base.
        dropped = self.lora_dropout[name](x)
        low = plain_linear(plain_linear(dropped, a), b)
        share = (gain - 1) * linear(base.permuted(dropped), *packed)
        y = linear(base.permuted(x), *packed, bias) + share + gain * low
        return y.to(x.dtype)

    @torch.no_grad()
    def dora_norm(self, name: str) -> torch.Tensor:
        """||W + s B A|| of each row, from ||W||^2 + 2 <W, sBA> + ||sBA||^2: `rank` rows over W."""
        base = self.base_layer
        a = self.lora_A[name].weight.float() * self.scaling[name]
        b = self.lora_B[name].weight.float()
        product = linear(base.permuted(a.contiguous()), *base.operands).t()  # [rows, rank]
        squares = (
            base.row_squares.view(torch.float32) + 2 * (b * product).sum(1) + ((b @ (a @ a.t())) * b).sum(1)
        )
        return squares.clamp_min(0).sqrt()

    # Merging replaces the packed base by a dense layer: adding to 4-bit codes would round most of the adapter
    # away. The packed layer is kept aside and unmerging brings back its exact bytes.

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        packed = caches(self).get("packed_base", self.base_layer)
        if not isinstance(packed, QuantLinear):
            return super().merge(safe_merge, adapter_names)
        total = [*self.merged_adapters, *names]
        weight, bias = self._merged(packed, total)
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"the merged weight has NaN or infinite entries, wanted finite: adapters {total}"
            )
        frozen = None if bias is None else nn.Parameter(bias, requires_grad=False)
        caches(self)["packed_base"] = packed
        self.base_layer = dense_linear(nn.Parameter(weight, requires_grad=False), frozen)
        self.merged_adapters = total
        return None

    @torch.no_grad()
    def _merged(self, packed: QuantLinear, names: list[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The dense weight with the adapters, and the bias, by the rule of `monograph merge`.

        The base is what the kernels multiply with: decoded and rounded to the dtype of the weight. Everything
        after it is computed in 64 bits and rounded once. docs/explain/merge.md states it.
        """
        for name in names:
            variant = self.lora_variant.get(name)
            if variant is not None and not isinstance(variant, DoraLinearVariant):
                raise ValueError(
                    f"merge: adapter {name!r} is a {type(variant).__name__}, wanted LoRA or DoRA"
                )
        weight = packed.dequantize()
        for begin in range(0, weight.shape[0], _MERGED_ROWS):
            rows = slice(begin, begin + _MERGED_ROWS)
            weight[rows] = rounded_once(self._merged_rows(weight[rows].double(), rows, names), weight.dtype)
        bias = packed.bias
        for name in names:
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError(f"merge: adapter {name!r} has a bias, the base layer has none")
                bias = bias.double() + self.lora_B[name].bias.double() * self.scaling[name]
        return weight, None if bias is None else rounded_once(bias.double(), packed.weight_dtype)

    def _merged_rows(self, base: torch.Tensor, rows: slice, names: list[str]) -> torch.Tensor:
        weight = base.clone()
        for name in names:
            b, a = self.lora_B[name].weight[rows].double(), self.lora_A[name].weight.double()
            delta = (b @ a) * self.scaling[name]
            weight += delta
            if isinstance(self.lora_variant.get(name), DoraLinearVariant):
                magnitude = self.lora_magnitude_vector[name].weight[rows].double()
                weight *= (magnitude / (base + delta).norm(dim=1)).unsqueeze(1)
        return weight

    def unmerge(self) -> None:
        packed = caches(self).pop("packed_base", None)
        if packed is None:
            return super().unmerge()
        self.base_layer = packed
        self.merged_adapters = []
        return None
