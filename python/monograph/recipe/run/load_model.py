"""The model of a recipe: folder, packed base, adapter."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from monograph.distributed.expert_adapter import factor_cuts
from monograph.distributed.world import World
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_checks import start_of
from monograph.recipe.config.model_folder import naming
from monograph.recipe.config.placement import Sharding, device_of, expert_ranks, sharding_of
from monograph.recipe.data.new_tokens import check_new_rows_are_trained, grow_vocabulary, has_new_rows
from monograph.recipe.run.adapter_names import check_names
from monograph.recipe.run.trained_base import check_trained_base

_log = logging.getLogger("monograph")


def load_base(recipe: Recipe, folder: str) -> Any:
    """The frozen base: quantised while it loads, or as it is if the folder is quantised. Of a reward model
    its head, which gives one number, is drawn by `seed`."""
    from monograph.hf.transformers import experts
    from monograph.hf.transformers.experts import has_known_experts
    from monograph.hf.transformers.loading import from_pretrained, stored_quantization
    from monograph.hf.transformers.quantizer import MonographConfig

    wanted = None
    with naming("base_model", recipe.base_model):
        stored = stored_quantization(folder)
    if recipe.adapter == "qlora" and stored is None:
        options = recipe.bnb_config_kwargs
        wanted = MonographConfig(
            options.get("bnb_4bit_quant_type", "nf4"),
            double_quant=options.get("bnb_4bit_use_double_quant", True),
        )
    elif recipe.load_in_8bit and stored is None:
        wanted = MonographConfig("int8")
    dtype = torch.float16 if recipe.fp16 else torch.bfloat16 if recipe.bf16 else torch.float32
    device = device_of(recipe)
    where: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    if recipe.reward_model:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        where["config"] = AutoConfig.from_pretrained(folder, num_labels=1)
        where["model_class"] = AutoModelForSequenceClassification
        torch.manual_seed(recipe.seed)
    with naming("base_model", recipe.base_model):
        attention = attention_on(recipe, device.type)
        model = from_pretrained(
            folder,
            wanted,
            dtype=dtype,
            attn_implementation=attention,
            base_memory=recipe.base_memory,
            **where,
        )
    grow_vocabulary(model, recipe, folder)
    if recipe.base_memory is not None and "rows_before_new_tokens" in vars(model):
        raise ValueError(
            "base_memory and new tokens: embedding and head have grown and lie in memory, not in the files; "
            "add the tokens to the folder of the model first, or leave base_memory out"
        )
    model.config.use_cache = False
    if has_known_experts(model):
        model.set_experts_implementation(experts.NAME)
    return model


def attention_on(recipe: Recipe, device: str) -> str:
    """The attention of a recipe on a kind of device: elsewhere than on a CPU and CUDA ours has no kernel, and
    only packed rows, which need it, take it."""
    packs = recipe.sample_packing or recipe.packs_evaluation
    return (
        recipe.attention if device in ("cpu", "cuda") or packs or recipe.attention != "monograph" else "sdpa"
    )


def takes_ours(recipe: Recipe, device: str) -> bool:
    """What `optimize` is told: True refuses by name what cannot be, False keeps the attention there is."""
    return recipe.attention == "monograph" and device in ("cpu", "cuda")


def is_packed(model: Any) -> bool:
    """Whether a base is quantised, by the recipe or in its folder: an adapter then belongs to its
    dequantised weights."""
    from monograph.nn import PackedExperts, QuantLinear

    return any(isinstance(layer, (QuantLinear, PackedExperts)) for layer in model.modules())


def check_start(model: Any, folder: str) -> None:
    """Refuses a checkpoint whose adapter (PiSSA, LoftQ) left another base than this model's has."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    if any(getattr(layer, "residual_of", None) is not None for layer in model.modules()):
        # The layers compare the record of the base with their own. Factors of experts may be shares here.
        found = load_file(os.path.join(folder, "adapter_model.safetensors"))
        kept = (
            {name: t for name, t in found.items() if ".experts." not in name} if factor_cuts(model) else found
        )
        set_peft_model_state_dict(model, kept)


def lora_config(recipe: Recipe) -> Any:
    """PEFT's configuration of the adapter."""
    from peft import LoraConfig

    start, loftq = start_of(recipe)
    parameters = recipe.lora_target_parameters
    modules = "all-linear" if recipe.lora_target_linear else recipe.lora_target_modules
    if parameters and modules is None:
        modules = []  # None would be PEFT's choice for the model
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
        lora_dropout=recipe.lora_dropout,
        target_modules=modules,
        target_parameters=[parameters] if isinstance(parameters, str) else parameters,
        modules_to_save=recipe.lora_modules_to_save,
        trainable_token_indices=recipe.peft_trainable_token_indices,
        ensure_weight_tying=recipe.peft_ensure_weight_tying,
        rank_pattern=recipe.lora_rank_pattern,
        alpha_pattern=recipe.lora_alpha_pattern,
        use_rslora=recipe.peft_use_rslora,
        use_dora=recipe.peft_use_dora,
        layers_to_transform=recipe.peft_layers_to_transform,
        layers_pattern=recipe.peft_layers_pattern,
        init_lora_weights=start,  # type: ignore[arg-type]
        loftq_config=loftq,
        task_type="SEQ_CLS" if recipe.reward_model else "CAUSAL_LM",
    )


def adapter_config(recipe: Recipe, base: Any) -> Any:
    """The same with the layers of this base: lora_target_modules beside lora_target_linear are more of them,
    as in axolotl."""
    from monograph.hf.peft.lora_experts import all_linear_and, all_linear_without_router

    config = lora_config(recipe)
    more = recipe.lora_target_modules if recipe.lora_target_linear else None
    return all_linear_and(base, config, more) if more else all_linear_without_router(base, config)


def set_router_loss(recipe: Recipe, base: Any) -> None:
    """As a config of transformers says it; TrainStep reads it there."""
    config = base.config.get_text_config()
    if recipe.output_router_logits is not None:
        config.output_router_logits = recipe.output_router_logits
    if recipe.router_aux_loss_coef is not None:
        config.router_aux_loss_coef = base.router_aux_loss_coef = recipe.router_aux_loss_coef


def load_model(recipe: Recipe, folder: str, world: World | None = None, base: Any = None) -> Any:
    """The base with a new adapter, or with that of lora_model_dir, ready to train on these ranks. base: what
    `load_base` gives for this recipe; it is loaded if there is none."""
    from peft import PeftModel, get_peft_model

    from monograph.distributed.expert_parallel import expert_parallel
    from monograph.distributed.file_ranges import read_small_tensors
    from monograph.distributed.watchdog import barrier
    from monograph.hf.optimize import optimize
    from monograph.hf.peft.packed_layers import refuse_packed_copies
    from monograph.hf.transformers.activation_checkpointing import enable_checkpointing
    from monograph.packing.stateful_layers import refuse_packed
    from monograph.packing.unsupported_attention import refuse_unsupported_attention
    from monograph.training.token_slices import slice_mlps

    held = sharding_of(recipe, 1 if world is None else world.size)
    spread = expert_ranks(recipe, 1 if world is None else world.size)
    if max(held.shard, spread) > 1:
        read_small_tensors(folder)
    base = load_base(recipe, folder) if base is None else base
    set_router_loss(recipe, base)
    if recipe.sample_packing or recipe.packs_evaluation:
        refuse_packed(base, "sample_packing: true")
    if recipe.gradient_checkpointing:
        enable_checkpointing(base, {"use_reentrant": False})
    torch.manual_seed(recipe.seed)  # the start of the adapter
    if recipe.lora_model_dir:
        if world is None or world.first:
            check_trained_base(recipe, recipe.lora_model_dir, folder, base)
        model = PeftModel.from_pretrained(base, recipe.lora_model_dir, is_trainable=True)
    else:
        refuse_packed_copies(base, recipe.lora_modules_to_save, "lora_modules_to_save")
        model = get_peft_model(base, adapter_config(recipe, base))
        check_names(recipe, model)
    check_new_rows_are_trained(model)
    if held.shard > 1 and has_new_rows(model):
        raise ValueError(
            f"shard_size is {held.shard} and tokens are new: a vocabulary that grew is not sharded; write "
            "shard_size: 1, or add the tokens to the folder of the model first"
        )
    optimize(model, attention=takes_ours(recipe, device_of(recipe).type))
    if recipe.tiled_mlp:
        slice_mlps(model, recipe.tiled_mlp_num_shards)
    if recipe.sample_packing or recipe.packs_evaluation:
        refuse_unsupported_attention(base, "sample_packing: true")
    if max(held.shard, spread) > 1:
        assert world is not None
        barrier(world, "load")  # the collectives of what follows wait no longer than a timeout
        if spread > 1:
            expert_parallel(model, world, spread)
        if held.shard > 1:
            _shard(model, world, held)
    return model


def _shard(model: Any, world: World, held: Sharding) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from monograph.distributed.shard import shard

    if any(getattr(layer, "dense_source", None) is not None for layer in model.modules()):
        _log.warning(
            "monograph: shard_size: the base was quantised while it loaded, so that each rank held all of it "
            "until it was sharded; of a folder by `monograph quantize` each rank reads its part alone"
        )
    mesh: Any = world
    if held.replicate > 1:
        mesh = init_device_mesh("cpu", (held.replicate, held.shard), mesh_dim_names=("replicate", "shard"))
    shard(model, mesh)
