"""AdapterRun: what is said of one adapter among several; what none of them may have is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig

from monograph.training import TrainStep

# Starts that leave another base than the one that all share.
_RESIDUAL = ("pissa", "loftq", "corda", "olora")
# Of the base, of which others have the same tensors.
_OF_BASE = ("modules_to_save", "trainable_token_indices")
# What differs from adapter to adapter and is no part of a graph or an operator: starts and notes.
_NOT_KIND = {
    "init_lora_weights": True,
    "base_model_name_or_path": None,
    "revision": None,
    "inference_mode": False,
}


@dataclass(frozen=True)
class AdapterRun:
    """One adapter: its factors, and how it is trained. seed: its start and its dropout."""

    config: LoraConfig
    learning_rate: float = 2e-4
    seed: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    options: dict[str, Any] = field(default_factory=dict)  # of TrainStep: virtual_shards, loss_scaling ...

    def kind(self) -> str:
        """What two adapters must have alike to use the same graphs: all but start, rate and seed."""
        config = self.config.to_dict() | _NOT_KIND
        config = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        rest = (self.max_grad_norm, self.weight_decay, self.betas, self.eps, sorted(self.options.items()))
        return repr((sorted(config.items(), key=lambda item: item[0]), rest))

    def step(self, model: Any, mode: str, dynamic: bool) -> TrainStep:
        """The step of this adapter alone."""
        return TrainStep(
            model,
            mode=mode,
            dynamic=dynamic,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            **self.options,
        )


def check_run(name: str, run: AdapterRun) -> None:
    """ValueError that names the adapter and what it cannot have beside others."""
    if not isinstance(run.config, LoraConfig):
        raise ValueError(f"adapter {name}: config is a {type(run.config).__name__}, wanted a LoraConfig")
    start = run.config.init_lora_weights
    if isinstance(start, str) and start.startswith(_RESIDUAL):
        raise ValueError(
            f"adapter {name}: init_lora_weights is {start}, which changes the base that others share; wanted "
            "True, gaussian, orthogonal or mica"
        )
    for key in _OF_BASE:
        if getattr(run.config, key, None):
            raise ValueError(
                f"adapter {name}: {key} trains tensors of the base that others share; wanted factors alone"
            )
