"""The rows of support.model_changes through other models, memory and dtypes, for docs/reference/training.md.

PYTHONPATH=python:tests/python python -m support.step_settings [NAME ...]    # prints its lines
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
)

import monograph as mg
from monograph.bench.large_model import write_model
from monograph.memory.base_memory import limit_base_memory
from support.between_steps import SAME, Setting, outcomes, page
from support.model_changes import adapted, packed


@functools.cache
def mapped_folder(layers: int) -> pathlib.Path:
    """Layers of 7.75 MiB, packed."""
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128, "vocab_size": 64}
    write_model(folder, layers, **sizes, num_attention_heads=8, num_key_value_heads=4)
    return folder


def mapped(
    dtype: torch.dtype = torch.float32, dropout: float = 0.0, layers: int = 1, hooked: bool = False
) -> Any:
    """A base of more than 40 MiB."""
    model = mg.from_pretrained(mapped_folder(5 + layers), dtype=torch.float32)
    return adapted(model, dtype=dtype, dropout=dropout, hooked=hooked)


def limited(model: Any) -> Any:
    """Of a layer and the least beside it."""
    limit_base_memory(model.get_base_model(), "40MiB")
    return model


def opt(
    dtype: torch.dtype = torch.float32, dropout: float = 0.0, layers: int = 1, hooked: bool = False
) -> Any:
    """LayerNorms with biases, learned positions, no gated MLP."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=1,
    )
    return adapted(packed(OPTForCausalLM(config)), dtype=dtype, dropout=dropout, hooked=hooked)


def vision(
    dtype: torch.dtype = torch.float32, dropout: float = 0.0, layers: int = 1, hooked: bool = False
) -> Any:
    """Gemma 3 with its tower, which has adapters too."""
    small = {"num_attention_heads": 2, "num_hidden_layers": layers}
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    seen = {"hidden_size": 32, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
    ids: dict[str, Any] = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92}
    config = Gemma3Config(
        text_config=text | small | {"num_key_value_heads": 1, "layer_types": ["full_attention"] * layers},
        vision_config=seen | small,
        mm_tokens_per_image=4,
        **ids,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zero at first
    # Ours has no mask for images.
    return adapted(packed(model), dtype=dtype, dropout=dropout, hooked=hooked, attention=False)


HALF = {"computes": torch.float16}
SETTINGS: dict[str, Setting] = {
    "mode `per_layer` (`aot_eager`)": Setting("per_layer", options={"backend": "aot_eager"}),
    "a model in float16": Setting("graph", built=HALF),
    "a model and adapters in float16": Setting("graph", built=HALF | {"dtype": torch.float16}),
    "`base_memory`, 40 of 47 MiB": Setting(
        "eager", made=mapped, ours=limited, alone=("`model.share_memory()`",)
    ),
    "OPT": Setting("graph", made=opt),
    "Gemma 3 with images": Setting("graph", made=vision),
}


def line(name: str, cells: dict[str, str], usual: dict[str, str]) -> str:
    """A row of the page: how many cells there are of each kind, and which are not the usual ones."""
    same = sum(cell == SAME for cell in cells.values())
    refused = sum(cell.startswith("refused: ") for cell in cells.values())
    others = "; ".join(f"{text}: {cell}" for text, cell in cells.items() if cell != usual[text])
    return f"| {name} | {same} | {refused} | {len(cells) - same - refused} | {others or 'none'} |"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or list(SETTINGS):
        mode = SETTINGS[wanted].mode
        print(line(wanted, outcomes(SETTINGS[wanted]), page()["graph" if mode == "per_layer" else mode]))
