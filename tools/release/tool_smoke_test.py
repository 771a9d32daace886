"""The wheel `monograph-tool` in an environment without torch: every command that writes or checks.

    python tools/release/tool_smoke_test.py [PROGRAM]

The Python that runs it needs no package: the model, the tokenizer and the adapter, named as unsloth names its
bases, are written here byte by byte. PROGRAM is the monograph-tool beside this Python unless given. The last
line is one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

HIDDEN, INTERMEDIATE, RANK = 64, 96, 4
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level BPE, as GPT-2 chose them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    letters = sorted(byte_letters())
    special = ["<unk>", "<s>", "</s>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {word: i for i, word in enumerate([*special, *letters, "ab"])},
            "merges": [["a", "b"]],
        },
    }


VOCABULARY = len(tokenizer()["model"]["vocab"])
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def write_safetensors(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Random values in fp32."""
    source = random.Random(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        begin = len(body)
        body += struct.pack(f"<{count}f", *(source.gauss(0, 0.1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(body)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_base(folder: pathlib.Path) -> None:
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    layer = "model.layers.0."
    shapes |= {f"{layer}{name}.weight": shape for name, shape in PROJECTIONS.items()}
    shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    write_safetensors(folder / "model.safetensors", shapes, 1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
        "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    words = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def write_adapter(folder: pathlib.Path) -> None:
    """As PEFT saves what unsloth trained: the base is named by its 4-bit upload."""
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in PROJECTIONS.items():
        prefix = f"base_model.model.model.layers.0.{name}"
        shapes |= {f"{prefix}.lora_A.weight": (RANK, columns), f"{prefix}.lora_B.weight": (rows, RANK)}
    write_safetensors(folder / "adapter_model.safetensors", shapes, 2)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 3 * RANK, "lora_dropout": 0.0,
        "bias": "none", "base_model_name_or_path": "unsloth/tiny-llama-bnb-4bit", "inference_mode": True,
        "target_modules": sorted(name.rpartition(".")[2] for name in PROJECTIONS), "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Tool:
    def __init__(self, program: pathlib.Path, folder: pathlib.Path) -> None:
        self.program, self.folder = program, folder
        self.commands = 0

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(self.program), *words], cwd=self.folder, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(words)}: exit {done.returncode}, wanted {code}\n{said}"
        self.commands += 1
        return said


def try_commands(tool: Tool) -> None:
    write_base(tool.folder / "base")
    write_adapter(tool.folder / "my-lora")
    said = tool.run("inspect", "my-lora")
    assert "unsloth/tiny-llama-bnb-4bit" in said, f"inspect does not name the adapter's base: {said}"
    assert "Next: monograph-tool" in tool.run("inspect", "base"), "the next command has another name"
    tool.run("adapter", "check", "base", "my-lora", "--for", "vllm")
    tool.run("adapter", "convert", "base", "my-lora", "--for", "vllm", "--out", "my-lora-vllm")
    tool.run("adapter", "convert", "base", "my-lora", "--for", "llama.cpp", "--out", "my-lora.gguf")
    tool.run("quantize", "base", "base-nf4", "--double-quant")
    tool.run("merge", "base", "--adapter", "my-lora", "--base", "original", "--out", "merged")
    four_bits = ("--as", "nf4", "--as-double-quant", "--to", "nf4")
    tool.run(
        "merge", "base", "--adapter", "my-lora", "--base", "dequantized", *four_bits, "--out", "merged-nf4"
    )
    tool.run("verify", "merged", "--write-manifest", "merged.json")
    tool.run("verify", "merged", "--check", "merged.json")
    tool.run("diff", "merged", "merged")
    tool.run("diff", "base", "merged", code=4)
    tool.run("export", "merged", "merged.gguf", "--type", "q8_0")
    assert (tool.folder / "merged.gguf").read_bytes()[:4] == b"GGUF"
    path = tool.folder / "merged" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    tool.run("verify", "merged", code=3)
    assert "pip install monograph" in tool.run("train", "recipe.yml", code=5)


def main() -> None:
    beside = pathlib.Path(sys.executable).with_name("monograph-tool")
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else beside).absolute()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tool = Tool(program, pathlib.Path(name))
        try_commands(tool)
    found = {
        "commands": tool.commands,
        "seconds": round(time.monotonic() - began, 1),
        "torch_installed": importlib.util.find_spec("torch") is not None,
        "program_bytes": program.stat().st_size,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
