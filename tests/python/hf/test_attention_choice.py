"""Which attention mg.optimize leaves a model with: the user's, ours, or what the device has."""

import pytest

from monograph.hf.transformers.loading import default_attention
from support.attention_models import after_optimize, build
from support.provider_rows import give_kernels


def test_a_choice_of_the_user_is_kept():
    assert after_optimize(build()) == "monograph"
    for chosen in ("eager", "flex_attention"):
        assert after_optimize(build(attn_implementation=chosen)) == chosen
        assert after_optimize(build(attn_implementation=chosen), attention=True) == "monograph"
    assert after_optimize(build(), attention=False) == "sdpa"


def test_no_score_matrix_on_a_device_without_a_kernel(monkeypatch):
    assert after_optimize(build("meta")) == "sdpa"
    with pytest.raises(ValueError, match="attention=True on meta: it has no kernel there"):
        after_optimize(build("meta"), attention=True)
    give_kernels(monkeypatch, False)
    assert after_optimize(build()) == "sdpa"


@pytest.mark.parametrize(
    ("device_map", "chosen"),
    [
        (None, "monograph"),
        ("cpu", "monograph"),
        ({"": "cpu"}, "monograph"),
        ("cuda", None),
        ("auto", None),
        ({"": 0}, None),
        ({"model": "cpu", "lm_head": "cuda:0"}, None),
    ],
)
def test_a_device_without_a_kernel_keeps_the_attention_of_transformers(device_map, chosen):
    assert default_attention(device_map) == chosen
