"""A tiny model of a class, and which attention mg.optimize leaves it with."""

import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import monograph as mg


def build(device="cpu", **options):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        **options,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def after_optimize(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no LoRA layer here
        mg.optimize(model, **options)
    return model.config._attn_implementation
