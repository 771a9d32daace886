"""Private names of accelerate."""

from __future__ import annotations

from monograph.upstream.private_name import PrivateName, loads_on_use

_READ = "1.15.0"

NAMES = {
    "dynamo_plugin": PrivateName(
        "accelerate:Accelerator().state.dynamo_plugin", _READ, "doctor: compiles in place of accelerate"
    ),
    "is_initialized": PrivateName(
        "accelerate.state:is_initialized", _READ, "optimize, doctor: whether FSDP was asked for and runs"
    ),
    "prepared": PrivateName(
        "accelerate:Accelerator.prepare_model", _READ, "doctor: undoes what it hangs on a model"
    ),
}

__getattr__ = loads_on_use(__name__, NAMES)

# What `prepare_model` hangs on a model.
HUNG_ON_MODELS = ("_original_forward", "_is_accelerate_prepared")
