"""AdapterRun: what is said of one adapter among several; what none of them may have is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig

from monograph.training import TrainStep

# Starts that leave another base than the one that all share.
_RESIDUAL = ("pissa", "loftq", "corda", "olora")
# Of TrainStep, what a run has no field for; the steps of an adapter are of one process.
_OPTIONS = {"virtual_shards", "loss_scaling", "offload", "offload_folder", "offload_min_bytes"}
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


def check_number(where: str, value: Any, *, most: float = math.inf, above: bool = False) -> None:
    """ValueError for what is no finite number from 0 to below `most`; `above`: 0 is none either."""
    fits = type(value) in (int, float) and math.isfinite(value) and 0 <= value < most
    if not fits or (above and value == 0):
        least = "above 0" if above else "0 or more"
        wanted = least if most == math.inf else f"{least} and less than {most:g}"
        raise ValueError(f"{where} is {value!r}, wanted a number, {wanted}")


def check_update(where: str, betas: Any, eps: Any, weight_decay: Any, clip: Any, clip_name: str) -> None:
    """ValueError that names a number by which AdamW would make factors that are not finite, or no update."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{where}betas is {betas!r}, wanted two numbers")
    for place, beta in enumerate(betas):
        check_number(f"{where}betas[{place}]", beta, most=1)
    check_number(f"{where}eps", eps)
    check_number(f"{where}weight_decay", weight_decay)
    check_number(f"{where}{clip_name}", clip)


def check_run(name: str, run: AdapterRun) -> None:
    """ValueError that names the adapter and what it cannot have beside others."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"an adapter is called {name!r}, wanted a word")
    if not isinstance(run, AdapterRun):
        raise ValueError(f"adapter {name} is a {type(run).__name__}, wanted an AdapterRun")
    if not isinstance(run.config, LoraConfig):
        raise ValueError(f"adapter {name}: config is a {type(run.config).__name__}, wanted a LoraConfig")
    if type(run.seed) is not int or not -(2**63) <= run.seed < 2**64:  # as torch takes them
        raise ValueError(f"adapter {name}: seed is {run.seed!r}, wanted a whole number of 64 bits")
    if unknown := sorted(set(run.options) - _OPTIONS):
        raise ValueError(
            f"adapter {name}: options has {unknown[0]!r}, wanted some of {', '.join(sorted(_OPTIONS))}"
        )
    where = f"adapter {name}: "
    check_number(f"{where}learning_rate", run.learning_rate)
    check_update(where, run.betas, run.eps, run.weight_decay, run.max_grad_norm, "max_grad_norm")
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
