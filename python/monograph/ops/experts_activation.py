"""The activations of `monograph::experts` and their gradients, by aten operations in the dtype of `pre`."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from monograph.ops.experts_arguments import Activation


class Gate(Protocol):
    """What says how pre becomes h: the arguments of a call, or the kind of a layer."""

    @property
    def activation(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...


def activate(pre: torch.Tensor, given: Gate) -> torch.Tensor:
    """h of pre, in the dtype of pre."""
    kind, limit = Activation(given.activation), given.limit
    if kind is Activation.RELU_SQUARED:
        return F.relu(pre).square()
    if kind is Activation.UNGATED_SILU:
        return F.silu(pre)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if given.interleaved else pre.chunk(2, dim=-1)
    if kind is Activation.SILU:
        return F.silu(gate) * up
    if kind is Activation.GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if kind is Activation.CLAMPED_SILU:
        return F.silu(gate) * up
    return (up + 1) * (gate * torch.sigmoid(given.alpha * gate))


def _silu_slope(gate: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Of gate * sigmoid(alpha gate)."""
    sigmoid = torch.sigmoid(alpha * gate)
    return sigmoid * (1 + alpha * gate * (1 - sigmoid))


def activate_backward(dh: torch.Tensor, pre: torch.Tensor, given: Gate) -> torch.Tensor:
    """The gradient of pre. No autograd: a kernel runs below it."""
    kind, limit = Activation(given.activation), given.limit
    if kind is Activation.RELU_SQUARED:
        return 2 * dh * F.relu(pre)
    if kind is Activation.UNGATED_SILU:
        return dh * _silu_slope(pre)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if given.interleaved else pre.chunk(2, dim=-1)
    if kind is Activation.SILU:
        dgate, dup = dh * up * _silu_slope(gate), dh * F.silu(gate)
    elif kind is Activation.GELU_TANH:
        dgate = torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh")
        dup = dh * F.gelu(gate, approximate="tanh")
    else:
        alpha, one = (given.alpha, 1.0) if kind is Activation.GPT_OSS else (1.0, 0.0)
        low, near = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        dgate = torch.where(gate <= limit, dh * (near + one) * _silu_slope(low, alpha), 0)
        dup = torch.where(up.abs() <= limit, dh * low * torch.sigmoid(alpha * low), 0)
    if given.interleaved:
        return torch.stack((dgate, dup), dim=-1).flatten(-2)
    return torch.cat((dgate, dup), dim=-1)
