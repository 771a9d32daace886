"""How many ranks share one copy of the base: shard_size, replicate_size, and axolotl's fsdp keys for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from monograph.recipe.config.keys import Recipe

# Entries of fsdp_config (axolotl's and, behind `fsdp_`, accelerate's) that change nothing here, and why.
_WITHOUT_EFFECT = {
    "version": "there is one way of sharding",
    "cpu_ram_efficient_loading": "each rank reads its own bytes of the files",
    "sync_module_states": "each rank reads its own bytes of the files",
    "use_orig_params": "trained parameters stay whole",
    "limit_all_gathers": "the graph has one gather a layer",
    "forward_prefetch": "the graph has one gather a layer",
    "backward_prefetch": "the graph has one gather a layer",
    "transformer_layer_cls_to_wrap": "the units are the decoder layers",
    "state_dict_type": "rank 0 writes a whole adapter",
    "final_state_dict_type": "rank 0 writes a whole adapter",
    "cpu_offload_pin_memory": "there is one device",
}
_LAYERS = "the units are the decoder layers; write TRANSFORMER_BASED_WRAP, or leave it out"
_HYBRID = "write shard_size (ranks that share one copy) and replicate_size (copies) instead of fsdp"
_NEVER_KEPT = "gathered layers are never kept for backward; write full_shard, or reshard_after_forward: true"
_OFFLOAD = "the base is in host memory already, a share of it on each rank"

# Values that mean what is done here, and what to write for others.
_WORDS: dict[str, tuple[dict[Any, str | None], str]] = {
    "reshard_after_forward": ({True: None, False: _NEVER_KEPT}, "true"),
    "offload_params": ({False: None, True: None}, "true or false"),
    "auto_wrap_policy": (
        {"TRANSFORMER_BASED_WRAP": None, "SIZE_BASED_WRAP": _LAYERS, "NO_WRAP": _LAYERS},
        "TRANSFORMER_BASED_WRAP",
    ),
    "sharding_strategy": (
        {
            "FULL_SHARD": None,
            "SHARD_GRAD_OP": _NEVER_KEPT,
            "NO_SHARD": "leave fsdp and fsdp_config out: ranks then share the mapped base",
            "HYBRID_SHARD": _HYBRID,
            "HYBRID_SHARD_ZERO2": _HYBRID,
        },
        "FULL_SHARD",
    ),
}
# Entries that are followed or need not be, and those that are refused whatever their value.
FSDP_ENTRIES = (*_WORDS, *_WITHOUT_EFFECT, "activation_checkpointing", "mixed_precision_policy")
FSDP_REFUSED = ("min_num_params",)
# The words of the older key `fsdp`.
_LEGACY: dict[str, str | None] = {
    "full_shard": None,
    "auto_wrap": None,
    "shard_grad_op": _NEVER_KEPT,
    "offload": None,
    "hybrid_shard": _HYBRID,
    "hybrid_shard_zero2": _HYBRID,
}


class Sharding(NamedTuple):
    """shard ranks share one copy of the base; there are replicate copies."""

    shard: int
    replicate: int


def wants_fsdp(recipe: Recipe) -> bool:
    """Whether axolotl would shard: fsdp_version alone says only how."""
    return bool(recipe.fsdp or recipe.fsdp_config)


def check_sharding(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Errors and notices that need no processes."""
    errors, notices = [], []
    for name in ("shard_size", "replicate_size"):
        value = getattr(recipe, name)
        if value is not None and value < 1:
            errors.append(f"{name} is {value}, wanted 1 or more")
    words = [recipe.fsdp] if isinstance(recipe.fsdp, str) else recipe.fsdp
    for word in " ".join(words).lower().split() if isinstance(words, list) else ():
        errors += _refused("fsdp", word, _LEGACY, "full_shard")
    for written, value in recipe.fsdp_config.items():
        errors += _wrong_entry(recipe, written, value)
    if recipe.fsdp_version not in (None, 1, 2):
        errors.append(f"fsdp_version is {recipe.fsdp_version}, wanted 2")
    elif recipe.fsdp_version is not None and not wants_fsdp(recipe):
        notices.append("fsdp_version: ignored; without fsdp_config nothing is sharded: write shard_size")
    if wants_fsdp(recipe):
        if recipe.shard_size == 1:
            errors.append("shard_size is 1 and fsdp shards the base; leave one of the two out")
        notices += _offloading(recipe)
        notices.append(
            "fsdp: the packed base is cut among the ranks; on one host ranks without fsdp share the pages of "
            "the mapped base, which takes less memory"
        )
    return errors, notices


def _offloading(recipe: Recipe) -> list[str]:
    """What FSDP would move to the host; a base is sharded on CPUs alone (device_keys.py)."""
    words = [recipe.fsdp] if isinstance(recipe.fsdp, str) else recipe.fsdp
    named = (
        ["fsdp: offload"] if isinstance(words, list) and "offload" in " ".join(words).lower().split() else []
    )
    named += [
        f"fsdp_config.{name}"
        for name, value in recipe.fsdp_config.items()
        if name.removeprefix("fsdp_") == "offload_params" and value
    ]
    return [f"{name}: {_OFFLOAD}; base_memory bounds what of a base is in memory" for name in named]


def _wrong_entry(recipe: Recipe, written: str, value: Any) -> list[str]:
    """What is wrong with an entry of fsdp_config."""
    name, where = written.removeprefix("fsdp_"), f"fsdp_config.{written}"
    if name in _WITHOUT_EFFECT:
        return []
    if name in _WORDS:
        return _refused(where, value, *_WORDS[name])
    if name == "activation_checkpointing":
        missing = value and not recipe.gradient_checkpointing
        return [f"{where}: not supported; write gradient_checkpointing: true"] if missing else []
    if name == "min_num_params":
        return [f"{where}: not supported; {_LAYERS}"] if value else []
    if name == "mixed_precision_policy":
        own = "fp16" if recipe.fp16 else "bf16" if recipe.bf16 else "no"
        alike = value in (own, {"no": "fp32", "bf16": "bfloat16", "fp16": "float16"}[own])
        return [] if alike else [f"{where} is {value}, and bf16 and fp16 mean {own}; leave it out"]
    return [f"{where}: unknown; known are {', '.join(sorted(FSDP_ENTRIES))}"]


def _refused(where: str, value: Any, meanings: dict[Any, str | None], wanted: str) -> list[str]:
    found = str(value).lower() if isinstance(value, bool) else value
    if not isinstance(value, bool | str) or value not in meanings:
        return [f"{where} is {found}, wanted {wanted}"]
    instead = meanings[value]
    return [] if instead is None else [f"{where} is {found}: not supported; {instead}"]


def sharding_of(recipe: Recipe, ranks: int) -> Sharding:
    """How `ranks` processes hold the base. ValueError if the keys want another number of them."""
    shard, replicate = recipe.shard_size, recipe.replicate_size
    if shard is None and replicate is None:
        return Sharding(ranks, 1) if wants_fsdp(recipe) else Sharding(1, ranks)
    if shard is None or replicate is None:
        given, other = ("replicate_size", replicate) if shard is None else ("shard_size", shard)
        assert other is not None
        if ranks % other:
            raise ValueError(
                f"{given} is {other}, and WORLD_SIZE is {ranks}, wanted a multiple of {other}: "
                "shard_size * replicate_size = WORLD_SIZE"
            )
        return Sharding(ranks // other, other) if shard is None else Sharding(other, ranks // other)
    if shard * replicate != ranks:
        raise ValueError(
            f"shard_size is {shard} and replicate_size {replicate}: {shard * replicate} processes, and "
            f"WORLD_SIZE is {ranks}; wanted shard_size * replicate_size = WORLD_SIZE"
        )
    return Sharding(shard, replicate)
