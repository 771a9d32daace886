"""Private names of flash-attn."""

from __future__ import annotations

from monograph.upstream.private_name import PrivateName, loads_on_use

_READ = "2.8.3"
_MODULE = "flash_attn.flash_attn_interface"
_FOR = "attention on CUDA: an operator of ours, with soft-caps"

NAMES = {
    "varlen_forward": PrivateName(f"{_MODULE}:_flash_attn_varlen_forward", _READ, _FOR),
    "varlen_backward": PrivateName(f"{_MODULE}:_flash_attn_varlen_backward", _READ, _FOR),
}

__getattr__ = loads_on_use(__name__, NAMES)
