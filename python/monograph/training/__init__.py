"""The training step and what it needs beside the model."""

from monograph.training.loss import causal_lm_loss, forward_loss, verify_head
from monograph.training.step import MODES, StepResult, TrainStep

__all__ = ["MODES", "StepResult", "TrainStep", "causal_lm_loss", "forward_loss", "verify_head"]
