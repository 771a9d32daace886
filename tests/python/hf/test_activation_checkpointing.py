"""Checkpointing by transformers' newest names, and by those of 5.22 where there are no others."""

import warnings
from types import SimpleNamespace

from monograph.hf.transformers.activation_checkpointing import (
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointing,
)
from support.tiny_models import tiny_llama


def test_no_name_that_is_deprecated_is_used():
    model = tiny_llama(num_hidden_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_checkpointing(model) is False
        enable_checkpointing(model, {"use_reentrant": False})
        assert is_checkpointing(model) is True
        disable_checkpointing(model)
        assert is_checkpointing(model) is False


def test_the_names_of_5_22_where_there_are_no_others():
    called = []
    old = SimpleNamespace(
        is_gradient_checkpointing=True,
        gradient_checkpointing_enable=called.append,
        gradient_checkpointing_disable=lambda: called.append("off"),
    )
    assert is_checkpointing(old) is True
    enable_checkpointing(old, {"use_reentrant": False})
    disable_checkpointing(old)
    assert called == [{"use_reentrant": False}, "off"]
    assert is_checkpointing(object()) is None
