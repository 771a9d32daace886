"""Which engine trains a recipe, and which trainer of TRL stands for `rl` or `reward_model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Rows = Literal["documents", "pairs", "labelled", "prompts"]


@dataclass(frozen=True)
class Method:
    """A trainer of TRL. fixed: fields of its config that the method itself is. experimental: TRL may change
    or remove it at any time."""

    trainer: str
    config: str
    rows: Rows
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experimental: bool = False


SFT = "sft"
REWARD = "reward_model"
METHODS: dict[str, Method] = {
    SFT: Method("SFTTrainer", "SFTConfig", "documents"),
    "dpo": Method("DPOTrainer", "DPOConfig", "pairs"),
    "ipo": Method("DPOTrainer", "DPOConfig", "pairs", {"loss_type": ["ipo"]}),
    "kto": Method("KTOTrainer", "KTOConfig", "labelled"),
    "orpo": Method("ORPOTrainer", "ORPOConfig", "pairs", experimental=True),
    "simpo": Method("CPOTrainer", "CPOConfig", "pairs", {"loss_type": "simpo"}, experimental=True),
    "grpo": Method("GRPOTrainer", "GRPOConfig", "prompts"),
    "gdpo": Method(
        "GRPOTrainer", "GRPOConfig", "prompts", {"multi_objective_aggregation": "normalize_then_sum"}
    ),
    REWARD: Method("RewardTrainer", "RewardConfig", "pairs"),
}


def wants_trl(keys: Mapping[str, Any]) -> bool:
    """Whether TRL trains these keys, as read from YAML: `trainer: trl`, or a key that only TRL can follow."""
    return keys.get("trainer") == "trl" or bool(keys.get("rl") or keys.get("reward_model"))


def method_of(rl: str | None, reward_model: bool) -> str:
    """The name in METHODS."""
    return REWARD if reward_model else rl or SFT


def trainer_classes(method: Method) -> tuple[Any, Any]:
    """The classes of trainer and config. ValueError if TRL is not there or lacks them."""
    try:
        import trl
    except ImportError as error:
        raise ValueError(
            f"trainer: trl is not installed ({error}); pip install 'trl>=1.16', which [train] has"
        ) from error
    from monograph.upstream import trl_names

    owner: Any = trl_names if method.experimental else trl
    try:
        return getattr(owner, method.trainer), getattr(owner, method.config)
    except (AttributeError, ImportError) as error:
        raise ValueError(f"trainer: TRL {trl.__version__} has no {method.trainer}: {error}") from error
