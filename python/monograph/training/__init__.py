"""The training step and what it needs besides the model."""

from monograph.training.loss import add_router_loss, causal_lm_loss, forward_loss, verify_head
from monograph.training.step import StepResult, TrainStep
from monograph.training.step_graphs import MODES
from monograph.training.verify_packing import verify_packing

__all__ = [
    "MODES",
    "StepResult",
    "TrainStep",
    "add_router_loss",
    "causal_lm_loss",
    "forward_loss",
    "verify_head",
    "verify_packing",
]
