"""Where the base of a recipe lies."""

from __future__ import annotations

import os

from monograph.recipe.keys import Recipe

# Weights, configs and what a tokenizer may consist of; no *.bin, *.pth, *.gguf, images or logs.
NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.py"]
# The same weights once more, for other programs: Meta's and Mistral's originals, exports, training states.
REPEATED = ["original/*", "consolidated*", "metal/*", "onnx/*", "openvino/*", "checkpoint-*/*"]


def model_folder(recipe: Recipe) -> str:
    """The folder of the base; a name on the Hub is downloaded once by its library."""
    folder = os.path.expanduser(recipe.base_model)
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    return snapshot_download(
        recipe.base_model, revision=recipe.revision_of_model, allow_patterns=NEEDED, ignore_patterns=REPEATED
    )
