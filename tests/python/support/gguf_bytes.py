"""A GGUF file byte by byte, with any field wrong: what the gguf package would not write."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q"}
_CODES[F64] = "d"
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q6_k": 14, "bf16": 30}
HIDDEN, HEADS, KEYS, HEAD, WIDE, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "abc", "\u0120", "\u0120a"] + [
    f"w{i}" for i in range(10, 32)
]
VOCABULARY = len(TOKENS)


@dataclasses.dataclass
class Array:
    element: int
    values: Any  # a list, or the bytes of it
    count: int | None = None


@dataclasses.dataclass
class Pair:
    key: bytes
    type: int
    value: Any


@dataclasses.dataclass
class Tensor:
    name: bytes
    shape: list[int]  # row-major
    kind: int
    data: bytes
    offset: int | None = None  # where the file says that it lies


@dataclasses.dataclass
class File:
    pairs: list[Pair]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"
    tensor_count: int | None = None
    pair_count: int | None = None
    alignment: int = 32
    tail: bytes = b""
    borders: list[int] = dataclasses.field(default_factory=list)  # of the last bytes()

    def pair(self, key: str) -> Pair:
        return next(pair for pair in self.pairs if pair.key == key.encode())

    def set(self, key: str, type: int, value: Any) -> None:
        self.drop(key)
        self.pairs.append(Pair(key.encode(), type, value))

    def drop(self, key: str) -> None:
        self.pairs = [pair for pair in self.pairs if pair.key != key.encode()]

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name.encode())

    def leave(self, name: str) -> None:
        self.tensors.remove(self.tensor(name))

    def bytes(self) -> bytes:
        out, self.borders = bytearray(), []

        def put(part: bytes) -> None:
            out.extend(part)
            self.borders.append(len(out))

        def number(kind: int, value: Any) -> bytes:
            return value if isinstance(value, bytes) else struct.pack(self.order + _CODES[kind], value)

        def text(value: Any) -> None:
            raw = value.encode() if isinstance(value, str) else value
            put(number(U64, len(raw)))
            put(raw)

        put(self.magic)
        put(number(U32, self.version))
        put(number(U64, len(self.tensors) if self.tensor_count is None else self.tensor_count))
        put(number(U64, len(self.pairs) if self.pair_count is None else self.pair_count))
        for pair in self.pairs:
            text(pair.key)
            put(number(U32, pair.type))
            if pair.type == STRING:
                text(pair.value)
            elif pair.type == ARRAY:
                array = pair.value
                put(number(U32, array.element))
                put(number(U64, len(array.values) if array.count is None else array.count))
                if array.element == STRING:
                    for value in array.values:
                        text(value)
                elif isinstance(array.values, bytes):
                    put(array.values)
                else:
                    put(b"".join(number(array.element, value) for value in array.values))
            else:
                put(pair.value if isinstance(pair.value, bytes) else number(pair.type, pair.value))
        data = bytearray()
        for tensor in self.tensors:
            text(tensor.name)
            put(number(U32, len(tensor.shape)))
            for size in reversed(tensor.shape):
                put(number(U64, size))
            put(number(U32, tensor.kind))
            put(number(U64, len(data) if tensor.offset is None else tensor.offset))
            data += tensor.data
            data += bytes(-len(data) % self.alignment)
        out.extend(bytes(-len(out) % self.alignment))
        put(bytes(data))
        put(self.tail)
        return bytes(out)


def q8_0(rows: int, cols: int, seed: int) -> tuple[bytes, np.ndarray]:
    """Blocks with any code, and their values."""
    rng = np.random.default_rng(seed)
    scale = (rng.uniform(0.5, 2, (rows * cols // 32, 1)) / 1024).astype(np.float16)
    codes = rng.integers(-127, 128, (rows * cols // 32, 32), dtype=np.int8)
    blocks = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1)
    return blocks.tobytes(), (scale.astype(np.float32) * codes).reshape(rows, cols)


def unturned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k of architecture "llama" in the order of transformers."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def tiny_llama() -> tuple[File, dict[str, np.ndarray]]:
    """A file that is right, and its weights under transformers' names: matrices in Q8_0, others in F32."""
    file, weights = File([], []), {}
    for key, value in {
        "block_count": LAYERS, "context_length": 64, "embedding_length": HIDDEN,
        "feed_forward_length": WIDE, "attention.head_count": HEADS, "attention.head_count_kv": KEYS,
        "vocab_size": VOCABULARY,
    }.items():  # fmt: skip
        file.set("llama." + key, U32, value)
    file.set("general.architecture", STRING, "llama")
    file.set("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)
    file.set("llama.rope.freq_base", F32, 10000.0)
    file.set("tokenizer.ggml.model", STRING, "gpt2")
    file.set("tokenizer.ggml.pre", STRING, "qwen2")
    file.set("tokenizer.ggml.tokens", ARRAY, Array(STRING, TOKENS))
    file.set("tokenizer.ggml.token_type", ARRAY, Array(I32, [2, 3, 3] + [1] * (VOCABULARY - 3)))
    file.set("tokenizer.ggml.merges", ARRAY, Array(STRING, ["a b", "ab c", "\u0120 a"]))
    file.set("tokenizer.ggml.bos_token_id", U32, 1)
    file.set("tokenizer.ggml.eos_token_id", U32, 2)

    def plain(name: str, module: str, shape: list[int]) -> None:
        values = np.random.default_rng(len(file.tensors)).standard_normal(shape).astype(np.float32)
        file.tensors.append(Tensor(name.encode(), shape, TYPES["f32"], values.tobytes()))
        weights[module] = values

    def matrix(name: str, module: str, rows: int, cols: int, heads: int = 0) -> None:
        data, values = q8_0(rows, cols, len(file.tensors))
        file.tensors.append(Tensor(name.encode(), [rows, cols], TYPES["q8_0"], data))
        weights[module] = unturned(values, heads) if heads else values

    plain("token_embd.weight", "model.embed_tokens.weight", [VOCABULARY, HIDDEN])
    for layer in range(LAYERS):
        block, path = f"blk.{layer}.", f"model.layers.{layer}."
        plain(block + "attn_norm.weight", path + "input_layernorm.weight", [HIDDEN])
        matrix(block + "attn_q.weight", path + "self_attn.q_proj.weight", HEADS * HEAD, HIDDEN, HEADS)
        matrix(block + "attn_k.weight", path + "self_attn.k_proj.weight", KEYS * HEAD, HIDDEN, KEYS)
        matrix(block + "attn_v.weight", path + "self_attn.v_proj.weight", KEYS * HEAD, HIDDEN)
        matrix(block + "attn_output.weight", path + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        plain(block + "ffn_norm.weight", path + "post_attention_layernorm.weight", [HIDDEN])
        matrix(block + "ffn_gate.weight", path + "mlp.gate_proj.weight", WIDE, HIDDEN)
        matrix(block + "ffn_up.weight", path + "mlp.up_proj.weight", WIDE, HIDDEN)
        matrix(block + "ffn_down.weight", path + "mlp.down_proj.weight", HIDDEN, WIDE)
    plain("output_norm.weight", "model.norm.weight", [HIDDEN])
    matrix("output.weight", "lm_head.weight", VOCABULARY, HIDDEN)
    return file, weights
