"""MonographConfig: how transformers' `from_pretrained` quantises, and what it makes of a quantised folder."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from monograph.ops.formats import GROUP_CODES, GROUP_FORMATS, Format, ZeroPoints, format_named
from monograph.quant.quant_methods import quant_method_of, quant_method_saving
from monograph.quant.quant_methods.quant_method import Quantization, QuantMethod

METHOD = "monograph"


@register_quantization_config(METHOD)
class MonographConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantises: format, block size, double quantisation, and which modules stay dense.

    `skip_modules` are module names as transformers matches them; None takes transformers' own choice, the
    output head and what is tied to it. `rule` and `scale_type` are those of `monograph.quantize`. A saved
    model carries the config and keys of a library that transformers loads it with: bitsandbytes for nf4 and
    fp4, transformers' own fp8 for fp8-block, compressed-tensors for the others. The latter divides by
    NVFP4's tensor scale, so "nvfp4" here is the format "nvfp4-divide".

    "int4" (W4A16), "int8" (W8A16) and "fp8" (a scale for each row) have scales of the weight's own type.
    Their `block_size` is a group of a row, by default 128 of int4; 0, the default of the others, is the row.
    `symmetric=False` gives int4 and int8 a zero point beside each scale.

    `stored` is set by `monograph.from_pretrained`: the quantization_config of a folder that is quantised.
    """

    def __init__(
        self,
        format: str = "nf4",
        *,
        block_size: int | None = None,
        double_quant: bool = False,
        rule: str = "default",
        scale_type: str | None = None,
        symmetric: bool = True,
        skip_modules: list[str] | None = None,
        stored: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise ValueError(f"MonographConfig: unknown arguments {sorted(unknown)}")
        fmt = format_named("nvfp4-divide" if format == "nvfp4" else format)
        if format in GROUP_FORMATS:
            found = f"MonographConfig: format is {format!r}, wanted {format.split('-')[0]!r}"
            raise ValueError(f"{found}: the type of the scales is that of the weight")
        block_size = fmt.default_block if block_size is None else block_size
        if not isinstance(symmetric, bool):
            raise TypeError(f"MonographConfig: symmetric is {symmetric!r}, wanted True or False")
        rule = _rule_of(fmt, rule, symmetric)
        if format == "fp8" and block_size != 0:
            raise ValueError(f"MonographConfig: block_size is {block_size}, fp8 wants 0, the row")
        fmt.check_block(1 if format in GROUP_CODES and block_size == 0 else block_size)
        fmt.rule_number(rule)
        fmt.scale_bytes(scale_type)
        if double_quant and not fmt.double_quant:
            raise ValueError(f"MonographConfig: double_quant is True, format {format} has none")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format = format if format in GROUP_CODES else fmt.name
        self.block_size = block_size
        self.double_quant = double_quant
        self.rule = rule
        self.scale_type = scale_type
        self.skip_modules = skip_modules
        self.stored = stored
        # Linear layers that are not packed, for the saved config; of a stored one only if they have changed.
        self.dense_modules: list[str] | None = None
        self.stacked_experts = False  # whether the saved model has packed experts

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Also of a folder with quant_method "monograph", where transformers alone reads the config."""
        if "config_groups" in config_dict:
            config_dict = loading_dict(config_dict)
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    @property
    def method(self) -> QuantMethod:
        return quant_method_saving(self.format) if self.stored is None else quant_method_of(self.stored)

    @property
    def symmetric(self) -> bool:
        return self.rule != "minmax"

    @property
    def bits(self) -> int:
        """Of an element; the larger if a folder has several formats."""
        names = [self.format] if self.stored is None else self.method.formats(self.stored)
        return max(format_named(name).bits for name in names)

    def to_dict(self) -> dict[str, Any]:
        """What a saved config holds."""
        marked = self.stacked_experts and self.method.linears  # gpt-oss as shipped has stacks anyway
        mark = {"monograph_experts": "stacked"} if marked else {}
        if self.stored is not None:
            return self.method.saved_again(self.stored, self.dense_modules or []) | mark
        chosen = Quantization(
            self.format,
            dense=self.skip_modules if self.dense_modules is None else self.dense_modules,
            double_quant=self.double_quant,
            scale_type=self.scale_type,
            block_size=self.block_size,
            symmetric=self.symmetric,
        )
        return self.method.config(chosen) | mark


def _rule_of(fmt: Format, rule: str, symmetric: bool) -> str:
    """`symmetric=False` is the rule "minmax", of formats with zero points."""
    if symmetric:
        return rule
    if fmt.zero_points is ZeroPoints.NONE:
        raise ValueError(
            f"MonographConfig: symmetric is False, format {fmt.name} has no zero points; int4 and int8 have"
        )
    if rule not in ("default", "minmax"):
        raise ValueError(f"MonographConfig: symmetric is False and rule {rule!r}, wanted one of the two")
    return "minmax"


def loading_dict(stored: dict[str, Any]) -> dict[str, Any]:
    """What `config.quantization_config` must hold for transformers to choose this quantizer for a folder with
    the quantization_config `stored`; an error if that cannot be read."""
    quant_method_of(stored)
    return {"quant_method": METHOD, "stored": stored}
