"""rotary_angles and rotary_frequencies: cosine and sine of float64, transformers' frequencies and modules."""

import pytest
import torch
from torch.library import opcheck
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from monograph.hf.transformers.elementwise import take_over
from monograph.ops.rotary_angles import ROPE_KINDS, portable_rotary_angles, rotary_angles, rotary_frequencies

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
}


def module_of(kind, theta=5e5, cls=LlamaRotaryEmbedding, config=LlamaConfig):
    parameters = {"rope_type": kind, "rope_theta": theta, **KINDS[kind]}
    return cls(config(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=parameters))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cosine_and_sine_of_float64(dtype):
    positions = torch.tensor([[0, 1, 2, 8191], [5, 131071, 77, 0]])
    frequencies = rotary_frequencies("default", 20, {"rope_theta": 1e4})
    angles = (positions[..., None].float() * frequencies).double().repeat(1, 1, 2)
    for scaling in (1.0, 1.1386294361119891):
        for operator in (rotary_angles, portable_rotary_angles):
            cos, sin = operator(positions, frequencies, scaling, dtype)
            assert torch.equal(cos, (angles.cos() * scaling).float().to(dtype))
            assert torch.equal(sin, (angles.sin() * scaling).float().to(dtype))


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("kind", list(ROPE_KINDS))
def test_frequencies_of_transformers(kind, theta):
    module = module_of(kind, theta)
    ours = rotary_frequencies(kind, 128, module.config.rope_parameters)
    assert ours.dtype == torch.float32
    assert torch.all((ours - module.inv_freq).abs() <= 2**-21 * module.inv_freq)


@pytest.mark.parametrize("kind", list(ROPE_KINDS))
@pytest.mark.parametrize(
    ("cls", "config"), [(LlamaRotaryEmbedding, LlamaConfig), (Qwen2RotaryEmbedding, Qwen2Config)]
)
def test_modules_are_taken_over(kind, cls, config):
    module = module_of(kind, cls=cls, config=config)
    positions, x = torch.arange(3000)[None] * 7, torch.randn(1, 3000, 8)
    want = module(x, positions)
    parameters = module.config.rope_parameters
    assert take_over(module).rotaries == take_over(module).rotaries == 1
    frequencies = rotary_frequencies(kind, 128, parameters)
    assert torch.equal(module.inv_freq, frequencies)
    for got, other in zip(module(x, positions), want, strict=True):
        # An angle of 21,000 moves by 2^-21 of itself with its frequency.
        assert (got - other).abs().max() <= 21_000 * 2**-21 + 2**-22
    for dtype in DTYPES:
        got = module(x.to(dtype), positions)
        want = rotary_angles(positions, frequencies, module.attention_scaling, dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert module.double()(x.double(), positions)[0].dtype == torch.float64


def test_frequencies_that_are_changed_later_are_taken():
    module = module_of("default")
    take_over(module)
    positions, x = torch.arange(50)[None], torch.zeros(1, 50, 8)
    module.inv_freq.mul_(0.5)
    written = module(x, positions)[0]
    module.inv_freq = module.inv_freq * 2
    replaced = module(x, positions)[0]
    for got, frequencies in ((written, module.inv_freq / 2), (replaced, module.inv_freq)):
        assert torch.equal(got, rotary_angles(positions, frequencies, 1.0, torch.float32)[0])


class Shifted(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids + 1)


def test_other_modules_are_left_alone():
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changed = module_of("default")
    changed.inv_freq.mul_(1.5)
    hooked = module_of("default")
    hooked.forward = lambda x, position_ids: (x, x)
    shifted = Shifted(LlamaConfig(hidden_size=64, num_attention_heads=2))
    for module in (LlamaRotaryEmbedding(config), changed, hooked, shifted):
        before = module.inv_freq.clone()
        assert take_over(module).rotaries == 0
        assert torch.equal(module.inv_freq, before)


def test_opcheck_and_one_graph():
    positions, frequencies = torch.arange(12).reshape(2, 6), torch.rand(4)
    opcheck(torch.ops.monograph.rotary_angles, (positions, frequencies, 1.5, torch.bfloat16))
    module = module_of("llama3")
    take_over(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 9, 40):
        x, positions = torch.randn(2, tokens, 8), torch.arange(tokens).expand(2, -1)
        got, want = compiled(x, positions), module(x, positions)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_misuse_is_named():
    positions, frequencies = torch.arange(4), torch.rand(4)
    for arguments, words in (
        ((positions.int(), frequencies, 1.0, torch.float32), "rotary_angles: positions is int32"),
        ((positions, frequencies.double(), 1.0, torch.float32), "rotary_angles: frequencies is"),
        ((positions, frequencies[None], 1.0, torch.float32), "rotary_angles: frequencies is"),
        ((positions, frequencies, 1.0, torch.float64), "rotary_angles: the output"),
    ):
        for operator in (torch.ops.monograph.rotary_angles, portable_rotary_angles):
            with pytest.raises((RuntimeError, ValueError), match=words):
                operator(*arguments)
    for arguments in ((4, 8, [1.0] * 8), (0, 7, [1.0] * 8), (0, 8, [1.0] * 7), (-1, 8, [1.0] * 8)):
        with pytest.raises(RuntimeError, match="rotary_frequencies: "):
            torch.ops.monograph.rotary_frequencies(*arguments)


@pytest.mark.parametrize(
    ("kind", "parameters", "words"),
    [
        ("dynamic", {"rope_theta": 1e4}, "is 'dynamic', wanted one of default, linear, llama3, yarn"),
        ("default", {}, "'default' has no number for rope_theta"),
        ("linear", {"rope_theta": 1e4}, "'linear' has no number for factor"),
        ("yarn", {"rope_theta": 1e4, "factor": None}, "number for factor, original_max_position_embeddings"),
    ],
)
def test_what_a_kind_needs_is_asked_for(kind, parameters, words):
    with pytest.raises(ValueError, match=words):
        rotary_frequencies(kind, 8, parameters)
