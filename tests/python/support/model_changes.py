"""What people do to a model between two steps: the rows of a table of docs/reference/training.md.

A row is a function of (model, turn, another), called before two steps, with turn 1 and 2; `another` makes a
second trainer of the same kind on the model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import monograph as mg
from monograph.nn import QuantLinear
from support.tiny_models import tiny_llama

TARGETS = ["q_proj", "down_proj", "fc2"]  # fc2: of OPT, and of Gemma's vision tower

Row = Callable[[Any, int, Callable[[], Any]], None]


def adapted(model: Any, *, dtype: torch.dtype, dropout: float, hooked: bool, **options: Any) -> Any:
    """With an adapter that is no start: B is drawn, too."""
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=TARGETS, lora_dropout=dropout)
    found: Any = mg.optimize(get_peft_model(model, lora), **options)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if hooked:
        found.removable = last_norm(found).register_forward_hook(scaled_output)
    return found.train()


def packed(model: Any) -> Any:
    for name, linear in list(model.model.named_modules()):
        if type(linear) is nn.Linear:
            model.model.set_submodule(name, QuantLinear.from_linear(linear, "nf4", block_size=32))
    return model


def build(
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    layers: int = 1,
    hooked: bool = False,
    computes: torch.dtype = torch.float32,
) -> Any:
    """dtype: of the adapter; computes: of everything else."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=layers, **sizes)
    return adapted(packed(model).to(computes), dtype=dtype, dropout=dropout, hooked=hooked)


def batch(seed: int, model: Any = None) -> dict[str, torch.Tensor]:
    """For a model that reads images, with two of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (2, 9), generator=generator)
    if not hasattr(getattr(model, "config", None), "vision_config"):
        return {"input_ids": ids, "labels": ids.clone()}
    ids[:, 2:6] = model.config.image_token_id
    kinds = (ids == model.config.image_token_id).long()
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "labels": ids.where(kinds == 0, -100), "token_type_ids": kinds} | {
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images,
    }


def decoder(model: Any) -> Any:
    body = model.base_model.model.model
    return getattr(body, "language_model", getattr(body, "decoder", body))


# The names of Llama, and of OPT where it has others.
NAMES = {"mlp": "fc2", "input_layernorm": "self_attn_layer_norm", "norm": "final_layer_norm"}


def part(parent: Any, name: str) -> tuple[str, Any]:
    """The child of a layer or decoder that plays this role, with its name."""
    found = name if hasattr(parent, name) else NAMES[name]
    return found, getattr(parent, found)


def layers_of(model: Any) -> Any:
    return decoder(model).layers


def last_norm(model: Any) -> Any:
    return part(decoder(model), "norm")[1]


def trained(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adapter(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if "default" in getattr(module, "lora_A", ())]


ROWS: dict[str, tuple[Row, dict[str, Any]]] = {}


def row(text: str, **built: Any) -> Callable[[Row], Row]:
    def enter(function: Row) -> Row:
        ROWS[text] = (function, built)
        return function

    return enter


def first(change: Callable[[Any], Any]) -> Row:
    """Before step 1 alone."""
    return lambda model, turn, another: change(model) if turn == 1 else None


row("nothing")(first(lambda model: None))
row("`model.eval()`")(first(lambda model: model.eval()))
row("`model.share_memory()`")(first(lambda model: model.share_memory()))
row("`copy.deepcopy(model)`, `model.save_pretrained(folder)`")(
    first(lambda model: (copy.deepcopy(model), model.save_pretrained(tempfile.mkdtemp())))
)
row("`model.to(torch.bfloat16).to(torch.float32)`")(
    first(lambda model: model.to(torch.bfloat16).to(torch.float32))
)
row("`model.to(torch.bfloat16)`")(first(lambda model: model.to(torch.bfloat16)))
row("`model.half().float()`")(first(lambda model: model.half().float()))
row("`model.half()`")(first(lambda model: model.half()))
row("`model.double()`")(first(lambda model: model.double()))
row("`model.float()`")(first(lambda model: model.float()))


def cast_base(model: Any, dtype: torch.dtype) -> None:
    """As PEFT's `prepare_model_for_kbit_training` and scripts like it do."""
    for name, p in model.named_parameters():
        if "lora_" not in name and p.is_floating_point():
            p.data = p.data.to(dtype)


row("all but the adapters to bfloat16")(first(lambda model: cast_base(model, torch.bfloat16)))
row("all but the adapters to float16")(first(lambda model: cast_base(model, torch.float16)))


@row("the same and back")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        cast_base(model, torch.float16)
        cast_base(model, torch.float32)


@row("`vector_to_parameters(v, parameters)`")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        vector = nn.utils.parameters_to_vector(trained(model)) * 0.5
        nn.utils.vector_to_parameters(vector, trained(model))


@row("`p.data = average`, a step, `p.data = what was there` (an average of weights swapped in)")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        model.kept = [p.data for p in trained(model)]
        for p in trained(model):
            p.data = p.data * 0.5
    elif turn == 2:
        for p, kept in zip(trained(model), model.kept, strict=True):
            p.data = kept


@row("`p.data.mul_(0.5)`, `p.copy_(...)` under `no_grad`")
def _(model: Any, turn: int, another: Any) -> None:
    for p in trained(model):
        p.data.mul_(0.5)
        with torch.no_grad():
            p.copy_(p * 1.5)


@row("`p.data = p.data.t().contiguous()`, another shape")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        p = trained(model)[0]
        p.data = p.data.t().contiguous()


@row("`model.load_state_dict(...)` of adapters")
def _(model: Any, turn: int, another: Any) -> None:
    model.load_state_dict({name: p * 0.5 for name, p in adapter(model).items()}, strict=False)


@row("`model.load_state_dict(..., assign=True)`")
def _(model: Any, turn: int, another: Any) -> None:
    model.load_state_dict({name: p * 0.5 for name, p in adapter(model).items()}, strict=False, assign=True)


@row("16-bit adapters: values loaded, or written through `p.data`", dtype=torch.bfloat16)
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        model.load_state_dict({name: p * 0.5 for name, p in adapter(model).items()}, strict=False)
    else:
        trained(model)[1].data.mul_(2)


@row("16-bit adapters: `p.data = another tensor`", dtype=torch.bfloat16)
def _(model: Any, turn: int, another: Any) -> None:
    for p in trained(model)[::2]:
        p.data = p.data * 0.5


def load_adapter(model: Any, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.load_adapter(folder, "default", is_trainable=True, **options)


row('`model.load_adapter(folder, "default")`')(first(load_adapter))
row('`model.load_adapter(folder, "default", low_cpu_mem_usage=True)`')(
    first(lambda model: load_adapter(model, low_cpu_mem_usage=True))
)


@row("`delete_adapter` and `add_adapter` of the same name")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        model.delete_adapter("default")
        model.add_adapter("default", LoraConfig(r=2, target_modules=TARGETS))
        model.set_adapter("default")


def second_adapter(model: Any, **options: Any) -> str:
    torch.manual_seed(5)
    name = f"other{len(model.peft_config)}"
    model.add_adapter(name, LoraConfig(r=2, target_modules=["v_proj", "q_proj"], **options))
    return name


row("`add_adapter` of a second one, which stays off")(first(second_adapter))
row('`set_adapter("other")`')(first(lambda model: model.set_adapter(second_adapter(model))))
row('`set_adapter("other")` and back')(
    first(lambda model: (model.set_adapter(second_adapter(model)), model.set_adapter("default")))
)
row('`base_model.set_adapter(["default", "other"])`')(
    first(lambda model: model.base_model.set_adapter(["default", second_adapter(model)]))
)
row("`base_model.disable_adapter_layers()`")(first(lambda model: model.base_model.disable_adapter_layers()))
row("the same and `enable_adapter_layers()`")(
    first(lambda model: (model.base_model.disable_adapter_layers(), model.base_model.enable_adapter_layers()))
)
row("`merge_adapter()`")(first(lambda model: model.merge_adapter()))
row("`merge_adapter()` and `unmerge_adapter()`")(
    first(lambda model: (model.merge_adapter(), model.unmerge_adapter()))
)


@row("`layer.scaling[adapter]`, `layer.set_scale(...)`")
def _(model: Any, turn: int, another: Any) -> None:
    for layer in lora_layers(model):
        if turn == 1:
            layer.scaling["default"] *= 3
        else:
            layer.set_scale("default", 0.25)


@row("a second `TrainStep` on the model, which makes a step")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        another()([batch(50, model)])


@row("a projection replaced by its copy")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        attention = layers_of(model)[0].self_attn
        attention.q_proj = copy.deepcopy(attention.q_proj)


def other_norm(parent: Any, role: str) -> None:
    name, found = part(parent, role)
    norm = copy.deepcopy(found)
    norm.weight.data.mul_(2)
    setattr(parent, name, norm)


row("a frozen norm of a layer replaced")(
    first(lambda model: other_norm(layers_of(model)[0], "input_layernorm"))
)
row("the last norm replaced")(first(lambda model: other_norm(decoder(model), "norm")))


@row("the frozen head: other data, written in place")
def _(model: Any, turn: int, another: Any) -> None:
    weight = model.base_model.model.lm_head.weight
    if turn == 1:
        weight.data = weight.data * 2
    else:
        weight.data.mul_(0.5)


@row("two layers swapped", layers=2)
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        layers = layers_of(model)
        layers[0], layers[1] = layers[1], layers[0]


@row("a layer deleted", layers=2)
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        del layers_of(model)[1]


def grad(model: Any, part: str, on: bool) -> Any:
    for name, p in model.named_parameters():
        if part in name:
            p.requires_grad_(on)


row("norms of layers unfrozen")(
    first(
        lambda model: [part(layer, "input_layernorm")[1].requires_grad_(True) for layer in layers_of(model)]
    )
)
row("the last norm unfrozen")(first(lambda model: last_norm(model).weight.requires_grad_(True)))
row("`lora_A` frozen")(first(lambda model: grad(model, "lora_A.default", False)))
row("`lora_A` frozen and freed")(
    first(lambda model: (grad(model, "lora_A.default", False), grad(model, "lora_A.default", True)))
)


def scaled_output(module: Any, inputs: Any, output: Any) -> Any:
    return output * 1.5


def scaled_input(module: Any, inputs: Any) -> Any:
    return (inputs[0] * 1.5, *inputs[1:])


def scaled_gradients(module: Any, gradients: Any, *outputs: Any) -> Any:
    return tuple(None if g is None else g * 1.5 for g in gradients)


row("a forward hook in a layer")(
    first(lambda model: part(layers_of(model)[0], "mlp")[1].register_forward_hook(scaled_output))
)
row("a forward hook on a layer")(
    first(lambda model: layers_of(model)[0].register_forward_hook(scaled_output))
)
row("a forward hook outside the layers")(
    first(lambda model: last_norm(model).register_forward_hook(scaled_output))
)
row("a forward pre-hook")(first(lambda model: last_norm(model).register_forward_pre_hook(scaled_input)))
row("a backward hook")(first(lambda model: last_norm(model).register_full_backward_hook(scaled_gradients)))
row("a backward pre-hook")(
    first(lambda model: last_norm(model).register_full_backward_pre_hook(scaled_gradients))
)


row("a hook removed", hooked=True)(first(lambda model: model.removable.remove()))


@row("a hook of every module (`register_module_forward_hook`)")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        model.handles = [register_module_forward_hook(lambda module, inputs, output: None)]


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


row("a gradient hook of a parameter (`p.register_hook`)")(
    first(lambda model: [p.register_hook(halved) for p in trained(model)])
)
row("`p.register_post_accumulate_grad_hook`")(
    first(lambda model: trained(model)[0].register_post_accumulate_grad_hook(lambda p: None))
)


def dropouts(model: Any, probability: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability


row("dropout from 0.1 to 0.5, and to 0", dropout=0.1)(
    lambda model, turn, another: dropouts(model, 0.5 if turn == 1 else 0.0)
)


@row("an `nn.Dropout` where none was")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        for layer in lora_layers(model):
            layer.lora_dropout["default"] = nn.Dropout(0.5)


row("`gradient_checkpointing_enable()`")(first(lambda model: model.gradient_checkpointing_enable()))
row('`set_attn_implementation("eager")`')(
    first(lambda model: model.base_model.model.set_attn_implementation("eager"))
)


@row("a buffer written in place (`rotary_emb.inv_freq`)")
def _(model: Any, turn: int, another: Any) -> None:
    for name, buffer in decoder(model).named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


@row("`norm.variance_epsilon`, in layers and outside")
def _(model: Any, turn: int, another: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):  # of Llama, of Gemma and OPT
            if hasattr(module, name):
                setattr(module, name, 0.1 * turn)


@row("`config.logits_scaling`")
def _(model: Any, turn: int, another: Any) -> None:
    model.config.logits_scaling = 1.0 + turn


@row("a second adapter that is on and frozen")
def _(model: Any, turn: int, another: Any) -> None:
    if turn == 1:
        other = second_adapter(model, init_lora_weights=False)
        model.base_model.set_adapter(["default", other])
        for name, p in model.named_parameters():
            if f".{other}." in name:
                p.requires_grad_(False)
