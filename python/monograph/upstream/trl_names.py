"""Private names of TRL."""

from __future__ import annotations

from typing import Any

from monograph.upstream.private_name import PrivateName, loads_on_use

_READ = "1.16.0"
_UTILS = "trl.trainer.utils"

NAMES = {
    "add_fused_lm_head": PrivateName(
        f"{_UTILS}:add_fused_lm_head", _READ, "optimize: its forward is replaced; bench step"
    ),
    "FusedCausalLMOutput": PrivateName(f"{_UTILS}:FusedCausalLMOutput", _READ, "optimize: what it returns"),
    "metrics": PrivateName("trl:SFTTrainer()._metrics", _READ, "doctor: put back after its steps"),
    "per_token_logps": PrivateName(
        "trl:GRPOTrainer._get_per_token_logps_and_entropies", _READ, "mismatch: what the trainer scores with"
    ),
    "ChunkedLogProbFunction": PrivateName(
        "trl.kernels.chunked_logprob:ChunkedLogProbFunction", _READ, "bench loss"
    ),
    "ORPOTrainer": PrivateName("trl.experimental.orpo:ORPOTrainer", _READ, "recipes: rl: orpo"),
    "ORPOConfig": PrivateName("trl.experimental.orpo:ORPOConfig", _READ, "recipes: rl: orpo"),
    "CPOTrainer": PrivateName("trl.experimental.cpo:CPOTrainer", _READ, "recipes: rl: simpo"),
    "CPOConfig": PrivateName("trl.experimental.cpo:CPOConfig", _READ, "recipes: rl: simpo"),
    "pack_dataset": PrivateName("trl.data_utils:pack_dataset", _READ, "bench packing"),
}

__getattr__ = loads_on_use(__name__, NAMES)

# What TRL's trainers write into instead of replacing it.
WRITTEN_INTO = ("_metrics", "_logs")


def fused_head_variables(forward: Any) -> dict[str, Any] | None:
    """The variables in which TRL's fused forward keeps its settings, and the class of what it returns under
    its own name; None for any other forward."""
    function = getattr(forward, "__func__", None)
    if function is None or function.__globals__.get("__name__") != _UTILS:
        return None
    if "FusedCausalLMOutput" not in function.__globals__:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    return found | {"FusedCausalLMOutput": function.__globals__["FusedCausalLMOutput"]}


def per_token_logps(trainer: Any) -> Any:
    """How a GRPO trainer scores tokens: called with the model, ids, their mask and how many are scored."""
    return trainer._get_per_token_logps_and_entropies


def set_per_token_logps(trainer: Any, score: Any) -> None:
    trainer._get_per_token_logps_and_entropies = score
