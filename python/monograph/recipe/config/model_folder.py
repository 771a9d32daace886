"""Where the base of a recipe lies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from monograph.ops.read_gguf import is_gguf
from monograph.recipe.config.keys import Recipe

# Weights, configs and what a tokenizer may consist of; no *.bin, *.pth, *.gguf, images or logs.
NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.py"]
# The same weights once more, for other programs: Meta's and Mistral's originals, exports, training states.
REPEATED = ["original/*", "consolidated*", "metal/*", "onnx/*", "openvino/*", "checkpoint-*/*"]


def stored_path(folder: str) -> str:
    """Where the weights of a base are: the GGUF file that a folder of `model_folder` names, or the folder."""
    from monograph.hf.transformers.gguf_folder import gguf_of

    return gguf_of(folder) or folder


@contextlib.contextmanager
def naming(key: str, value: str) -> Iterator[None]:
    """What libraries say of a wrong model, as one line that begins with the key and its value."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ValueError(said if said.startswith(f"{key}: ") else f"{key}: {value}: {said}") from error


def model_folder(recipe: Recipe) -> str:
    """The folder of the base; that of a GGUF file holds its settings and names it. A name on the Hub is
    downloaded once by its library."""
    folder = os.path.expanduser(recipe.base_model)
    if os.path.isdir(folder):
        return folder
    if is_gguf(folder):
        from monograph.hf.transformers.gguf_folder import gguf_folder

        with naming("base_model", recipe.base_model):
            return gguf_folder(folder)
    from huggingface_hub import snapshot_download

    with naming("base_model", f"{recipe.base_model} is no folder here, and from the Hub"):
        return snapshot_download(
            recipe.base_model,
            revision=recipe.revision_of_model,
            allow_patterns=NEEDED,
            ignore_patterns=REPEATED,
        )
