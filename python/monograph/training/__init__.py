"""What a training step needs beside the model."""

from monograph.training.loss import causal_lm_loss, forward_loss, verify_head

__all__ = ["causal_lm_loss", "forward_loss", "verify_head"]
