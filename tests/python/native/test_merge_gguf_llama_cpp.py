"""llama.cpp on a GGUF file that has an adapter merged into it, against the file with the adapter beside it.
Needs PyPI's xllamacpp, which CI does not install."""

import pytest

from support.gguf_adapters import adapter_on
from support.gguf_bases import MIXTURE, mixed_base
from support.llama_cpp_run import served
from support.native_tool import run, run_json

xllamacpp = pytest.importorskip("xllamacpp")
VOCABULARY = 400


def errors_of(name, place, kinds, strength=0.1):
    """What the adapter changes of the log-probabilities, and how far the merged file is off."""
    file, model = mixed_base(name, place, kinds)
    adapter = adapter_on(model, place / "lora", strength=strength)
    run("adapter", "convert", file, adapter, "--for", "llama.cpp", "--out", place / "lora.gguf")
    run_json("merge", file, "--adapter", adapter, "--out", place / "merged.gguf")
    before = served(file, vocabulary=VOCABULARY)
    wanted = served(file, place / "lora.gguf", VOCABULARY)
    found = served(place / "merged.gguf", vocabulary=VOCABULARY)
    change, error = (wanted - before).abs().max().item(), (found - wanted).abs().max().item()
    print(name, "change", change, "error", error)
    return change, error


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Phi3"])
def test_plain_floats(tmp_path, name):
    change, error = errors_of(name, tmp_path, {})
    assert change > 0.1
    assert error < 2e-5


@pytest.mark.parametrize(("kind", "share"), [("q8_0", 0.15), (None, 0.5)], ids=["q8_0", "mixture"])
def test_blocks(tmp_path, kind, share):
    """What is left is the rounding of the codes, and of inputs: llama.cpp rounds those of merged values, not
    those of B A."""
    kinds = MIXTURE if kind is None else dict.fromkeys(MIXTURE, kind)
    change, error = errors_of("Llama", tmp_path, kinds, strength=0.3)
    assert error < share * change
