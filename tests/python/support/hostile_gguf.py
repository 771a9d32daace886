"""Hostile GGUF files: what is wrong, who must say so, and what the message must name.

header      nothing of the file is used: every command and the loader refuse it
plan        `inspect` and `verify` read it, its weights have no place in a model
config      its weights can be written, its settings not: "not written: config.json", and no model is made
tokenizer   the same for tokenizer.json
values      `verify` finds numbers that are none, `dequantize` refuses them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from support.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    HIDDEN,
    I32,
    I64,
    STRING,
    TOKENS,
    TYPES,
    U8,
    U32,
    U64,
    VOCABULARY,
    WIDE,
    Array,
    File,
    Pair,
    Tensor,
)


def _value(key: str, type: int, value: object) -> Callable[[File], object]:
    return lambda file: file.set(key, type, value)


def _llama(key: str, type: int, value: object) -> Callable[[File], object]:
    return _value("llama." + key, type, value)


def _epsilon(type: int, value: object) -> Callable[[File], object]:
    return _llama("attention.layer_norm_rms_epsilon", type, value)


def _tokenizer(key: str, type: int, value: object) -> Callable[[File], object]:
    return _value("tokenizer.ggml." + key, type, value)


def _field(name: str, value: object) -> Callable[[File], object]:
    return lambda file: setattr(file, name, value)


def _tensor(tensor: str, **fields: object) -> Callable[[File], object]:
    def change(file: File) -> None:
        found = file.tensor(tensor)
        for field, value in fields.items():
            setattr(found, field, value)

    return change


def _bytes(name: str, at: int, data: bytes) -> Callable[[File], object]:
    def change(file: File) -> None:
        tensor = file.tensor(name)
        tensor.data = tensor.data[:at] + data + tensor.data[at + len(data) :]

    return change


def _all(*changes: Callable[[File], object]) -> Callable[[File], object]:
    def change(file: File) -> None:
        for one in changes:
            one(file)

    return change


def _more(name: bytes, shape: list[int], data: bytes | None = None) -> Callable[[File], object]:
    values = bytes(4 * math.prod(shape)) if data is None else data
    return lambda file: file.tensors.append(Tensor(name, shape, TYPES["f32"], values))


def _twice(file: File) -> None:
    file.pairs.append(Pair(b"llama.block_count", U32, 2))


def _tokens(change: Callable[[list[str | bytes]], object]) -> Callable[[File], object]:
    def changed(file: File) -> None:
        values: list[str | bytes] = list(TOKENS)
        change(values)
        file.pair("tokenizer.ggml.tokens").value = Array(STRING, values)

    return changed


def _types(values: list[int]) -> Callable[[File], object]:
    return lambda file: setattr(file.pair("tokenizer.ggml.token_type"), "value", Array(I32, values))


def _merges(*values: str | bytes) -> Callable[[File], object]:
    return lambda file: setattr(file.pair("tokenizer.ggml.merges"), "value", Array(STRING, list(values)))


class _Endless(bytes):
    """A text that says that it is longer than any file."""

    def __len__(self) -> int:
        return 2**63 - 1


def _renamed(architecture: str) -> Callable[[File], object]:
    def change(file: File) -> None:
        file.set("general.architecture", STRING, architecture)
        for pair in file.pairs:
            if pair.key.startswith(b"llama."):
                pair.key = architecture.encode() + pair.key[5:]

    return change


def _keys_of(heads: int) -> Callable[[File], object]:
    def change(file: File) -> None:
        for tensor in file.tensors:
            if tensor.name.endswith((b"attn_k.weight", b"attn_v.weight")):
                tensor.shape, tensor.data = [16 * heads, HIDDEN], bytes(heads * 16 * HIDDEN // 32 * 34)

    return change


def _phi(file: File) -> None:
    _renamed("phi3")(file)
    for layer in range(2):
        for name in ("attn_k", "attn_v", "ffn_gate"):
            file.leave(f"blk.{layer}.{name}.weight")
        for old, new, rows in (("attn_q", "attn_qkv", 128), ("ffn_up", "ffn_up", 2 * WIDE)):
            tensor = file.tensor(f"blk.{layer}.{old}.weight")
            tensor.name = f"blk.{layer}.{new}.weight".encode()
            tensor.shape, tensor.data = [rows, HIDDEN], bytes(rows * HIDDEN // 32 * 34)


def _experts(file: File, count: int = 4) -> None:
    """Each MLP as a stack of several, and routers."""
    for layer in range(2):
        for part in ("gate", "up", "down"):
            tensor = file.tensor(f"blk.{layer}.ffn_{part}.weight")
            tensor.name = f"blk.{layer}.ffn_{part}_exps.weight".encode()
            tensor.shape, tensor.data = [count, *tensor.shape], tensor.data * count
        _more(f"blk.{layer}.ffn_gate_inp.weight".encode(), [count, HIDDEN])(file)


def _mixtral(file: File) -> None:
    _experts(file)
    file.set("llama.expert_count", U32, 4)
    file.set("llama.expert_used_count", U32, 2)


def _gpt_oss(file: File) -> None:
    _experts(file)
    for layer in range(2):
        block = f"blk.{layer}."
        file.tensor(block + "ffn_norm.weight").name = (block + "post_attention_norm.weight").encode()
        for name, shape in {
            "attn_q.bias": [64], "attn_k.bias": [32], "attn_v.bias": [32], "attn_output.bias": [HIDDEN],
            "attn_sinks.weight": [4], "ffn_gate_inp.bias": [4], "ffn_gate_exps.bias": [4, WIDE],
            "ffn_up_exps.bias": [4, WIDE], "ffn_down_exps.bias": [4, HIDDEN],
        }.items():  # fmt: skip
            _more((block + name).encode(), shape)(file)
    _renamed("gpt-oss")(file)
    for key, number in {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 8}.items():
        file.set(f"gpt-oss.{key}", U32, number)


def _less(name: str, rows: int) -> Callable[[File], object]:
    """A stack whose experts have fewer outputs."""

    def change(file: File) -> None:
        tensor = file.tensor(name)
        count, _, cols = tensor.shape
        tensor.shape, tensor.data = [count, rows, cols], bytes(count * rows * cols // 32 * 34)

    return change


_GIVEN = [2, 3, 3] + [1] * (VOCABULARY - 3)
_PIECES = _all(_tokenizer("model", STRING, "llama"), lambda file: file.drop("tokenizer.ggml.merges"))
_Q, _NORM = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
_NAN16, _INF16 = struct.pack("<H", 0x7E00), struct.pack("<H", 0x7C00)

HEADER = [
    ("no_magic", 'other bytes than "GGUF"', _field("magic", b"GGML")),
    ("magic_turned", 'other bytes than "GGUF"', _field("magic", b"FUGG")),
    ("version_0", "version 0, wanted 2 or 3", _field("version", 0)),
    ("version_1", "version 1, wanted 2 or 3", _field("version", 1)),
    ("version_4", "version 4, wanted 2 or 3", _field("version", 4)),
    ("version_of_all_bits", "version 4294967295", _field("version", 2**32 - 1)),
    ("big_endian", "is big endian", _field("order", ">")),
    ("one_tensor_more_than_there_are", "tensor", lambda f: setattr(f, "tensor_count", len(f.tensors) + 1)),
    ("one_tensor_less", "behind the last tensor", lambda f: setattr(f, "tensor_count", len(f.tensors) - 1)),
    ("tensors_of_64_bits", "tensors and", _field("tensor_count", 2**64 - 1)),
    ("a_million_tensors", "", _field("tensor_count", 1_000_000)),
    ("pairs_of_64_bits", "tensors and", _field("pair_count", 2**63)),
    ("one_pair_more", "", lambda f: setattr(f, "pair_count", len(f.pairs) + 1)),
    ("one_pair_less", "", lambda f: setattr(f, "pair_count", len(f.pairs) - 1)),
    ("a_key_of_64_bits", "at most 65535", lambda f: f.pairs.insert(0, Pair(b"x" * 70_000, U32, 1))),
    ("an_empty_key", "empty key", lambda f: f.pairs.append(Pair(b"", U32, 1))),
    ("a_key_that_is_no_utf8", "no UTF-8", lambda f: f.pairs.append(Pair(b"a\xff\xfe", U32, 1))),
    ("a_key_twice", "'llama.block_count' is there twice", _twice),
    ("a_value_of_type_13", "type 13 of a value", lambda f: f.pairs.append(Pair(b"x", 13, b""))),
    ("a_value_of_type_2_32", "type 4294967295", lambda f: f.pairs.append(Pair(b"x", 2**32 - 1, b""))),
    ("an_array_of_arrays", "array of arrays", _value("x", ARRAY, Array(ARRAY, b"", 1))),
    ("an_array_of_type_77", "type 77 of a value", _value("x", ARRAY, Array(77, b"", 0))),
    ("an_array_beyond_the_file", "values of at least 4 bytes", _value("x", ARRAY, Array(U32, b"", 2**40))),
    ("an_array_whose_size_overflows", "values of at least 8 bytes",
     _value("x", ARRAY, Array(U64, b"", 2**61))),
    ("texts_beyond_the_file", "values of at least 8 bytes", _value("x", ARRAY, Array(STRING, b"", 2**62))),
    ("a_text_of_63_bits", "bytes long", lambda f: f.pairs.append(Pair(b"x", STRING, _Endless()))),
    ("alignment_0", "general.alignment is 0", _value("general.alignment", U32, 0)),
    ("alignment_48", "general.alignment is 48", _value("general.alignment", U32, 48)),
    ("alignment_of_a_gigabyte", "general.alignment is 1073741824", _value("general.alignment", U32, 2**30)),
    ("alignment_below_0", "no whole number", _value("general.alignment", I32, -32)),
    ("alignment_as_text", "no whole number", _value("general.alignment", STRING, "32")),
    ("alignment_of_64_that_is_not_kept", "", _value("general.alignment", U32, 64)),
    ("a_tensor_without_dimensions", "0 dimensions", _tensor(_NORM, shape=[])),
    ("a_tensor_of_5_dimensions", "5 dimensions", _tensor(_NORM, shape=[1, 1, 1, 1, HIDDEN])),
    ("a_dimension_of_0", "dimension 0", _tensor(_Q, shape=[0, HIDDEN])),
    ("a_dimension_of_64_bits", "too many elements", _tensor(_Q, shape=[64, 2**64 - 32])),
    ("elements_that_overflow", "too many elements", _tensor(_Q, shape=[2**33, 2**33])),
    ("a_row_more_than_there_is", "", _tensor(_Q, shape=[65, HIDDEN])),
    ("rows_of_part_of_a_block", "wanted a multiple of 32 for q8_0", _tensor(_Q, shape=[128, 33])),
    ("a_type_that_is_not_read", "type 10 (q2_k) is not read", _tensor(_Q, kind=10)),
    ("a_type_that_is_gone", "type 4 (which ggml does not have)", _tensor(_Q, kind=4)),
    ("a_type_of_32_bits", "type 4294967295", _tensor(_Q, kind=2**32 - 1)),
    ("a_type_of_64_bit_floats", "type 28 (f64) is not read", _tensor(_NORM, kind=28)),
    ("a_tensor_over_another", "wanted", _tensor(_Q, offset=0)),
    ("a_tensor_at_an_odd_place", "wanted", lambda f: setattr(f.tensor(_Q), "offset", 8193)),
    ("a_hole_before_a_tensor", "wanted", lambda f: setattr(f.tensor(_Q), "offset", 2**20)),
    ("a_tensor_beyond_64_bits", "wanted", _tensor(_Q, offset=2**64 - 32)),
    ("a_tensor_twice", "is there twice", _tensor("blk.1.attn_q.weight", name=_Q.encode())),
    ("a_name_of_64_bytes", "at most 63", _tensor(_Q, name=b"x" * 64)),
    ("a_name_that_is_no_utf8", "no UTF-8", _tensor(_Q, name=b"\xc0\xaf")),
    ("bytes_behind_the_end", "4096 bytes behind the last tensor", _field("tail", bytes(4096))),
]  # fmt: skip

PLAN = [
    ("another_architecture", "'mamba'", _value("general.architecture", STRING, "mamba")),
    ("no_architecture", "general.architecture ''", lambda f: f.drop("general.architecture")),
    ("an_architecture_of_a_number", "general.architecture ''", _value("general.architecture", U32, 7)),
    ("an_architecture_with_a_zero_byte", "general.architecture",
     _value("general.architecture", STRING, "llama\0")),
    ("part_1_of_3", "one of 3 parts", _value("split.count", U32, 3)),
    ("parts_as_text", "split.count", _value("split.count", STRING, "3")),
    ("a_tensor_that_is_counted_and_not_there", "split.tensors.count", _value("split.tensors.count", I32, 99)),
    ("a_layer_too_few", "llama.block_count", _llama("block_count", U32, 3)),
    ("no_layers", "llama.block_count", _llama("block_count", U32, 0)),
    ("four_thousand_million_layers", "llama.block_count", _llama("block_count", U32, 2**32 - 1)),
    ("layers_below_0", "llama.block_count", _llama("block_count", I64, -1)),
    ("a_tensor_of_no_model", "blk.0.ssm_in.weight", _more(b"blk.0.ssm_in.weight", [8])),
    ("a_name_with_a_zero_byte", "has no name", _tensor(_Q, name=_Q.encode() + b"\0")),
    ("a_layer_with_a_zero_in_front", "blk.00.attn_norm", _more(b"blk.00.attn_norm.weight", [HIDDEN])),
    ("a_layer_beyond_64_bits", "blk.99999999999999999999.",
     _more(b"blk.99999999999999999999.attn_norm.weight", [8])),
    ("four_thousand_million_layers_of_gemma", "gemma3.block_count",
     _all(_renamed("gemma3"), _value("gemma3.block_count", U32, 2**32 - 1))),
    ("no_heads", "no attention.head_count", lambda f: f.drop("llama.attention.head_count")),
    ("heads_that_do_not_divide_rows", "heads", _llama("attention.head_count", U32, 3)),
    ("heads_of_a_list", "wanted one number for all layers",
     _llama("attention.head_count", ARRAY, Array(U32, [4, 4]))),
    ("a_size_of_heads_that_is_another", "attention.key_length", _llama("attention.key_length", U32, 32)),
    ("experts_of_two_numbers", "blk.0.ffn_up_exps.weight", _all(
        _mixtral, _tensor("blk.0.ffn_up_exps.weight", shape=[3, WIDE, HIDDEN], data=bytes(3 * WIDE * 68)))),
    ("a_hundred_thousand_experts", "100000", _all(_mixtral, _llama("expert_count", U32, 100_000))),
    ("a_stack_of_two_dimensions", "blk.1.ffn_down_exps.weight", _all(
        _mixtral, _tensor("blk.1.ffn_down_exps.weight", shape=[4 * HIDDEN, WIDE]))),
    ("turns_of_two_widths", "wanted one shape", _all(_gpt_oss, _less("blk.1.ffn_up_exps.weight", 64))),
    ("gates_without_their_other_half", "has no up_proj.weight",
     _all(_gpt_oss, lambda f: f.leave("blk.0.ffn_up_exps.weight"))),
    ("a_bias_without_its_other_half", "has no gate_proj.bias",
     _all(_gpt_oss, lambda f: f.leave("blk.0.ffn_gate_exps.bias"))),
    ("biases_of_two_widths", "wanted one shape", _all(
        _gpt_oss, _tensor("blk.0.ffn_up_exps.bias", shape=[4, 32], data=bytes(512)))),
]  # fmt: skip

CONFIG = [
    ("heads_that_share_no_key", "head_count", _all(_llama("attention.head_count_kv", U32, 3), _keys_of(3))),
    ("an_odd_size_of_heads", "attention.key_length is 15",
     _all(_renamed("qwen3"), _value("qwen3.attention.key_length", U32, 15))),
    ("a_window_of_words", "attention.sliding_window",
     _all(_phi, _value("phi3.attention.sliding_window", STRING, "64"))),
    ("another_width", "embedding_length", _llama("embedding_length", U32, 63)),
    ("a_width_as_text", "embedding_length is something else", _llama("embedding_length", STRING, "64")),
    ("a_width_of_a_float", "embedding_length is something else", _llama("embedding_length", F32, 64.0)),
    ("a_width_that_is_missing", "embedding_length is missing", lambda f: f.drop("llama.embedding_length")),
    ("another_intermediate_size", "feed_forward_length is 97", _llama("feed_forward_length", U32, 97)),
    ("intermediate_sizes_of_layers", "feed_forward_length",
     _llama("feed_forward_length", ARRAY, Array(U32, [WIDE] * 2))),
    ("another_vocabulary", "vocab_size is 33", _llama("vocab_size", U32, VOCABULARY + 1)),
    ("no_context", "context_length is missing", lambda f: f.drop("llama.context_length")),
    ("a_context_of_0", "context_length", _llama("context_length", U32, 0)),
    ("a_context_of_64_bits", "context_length", _llama("context_length", U64, 2**63)),
    ("an_epsilon_of_0", "epsilon", _epsilon(F32, 0.0)),
    ("an_epsilon_below_0", "epsilon", _epsilon(F32, -1e-5)),
    ("an_epsilon_that_is_none", "epsilon", _epsilon(F32, math.nan)),
    ("an_epsilon_without_end", "epsilon", _epsilon(F64, math.inf)),
    ("an_epsilon_of_words", "epsilon", _epsilon(STRING, "1e-5")),
    ("a_rope_base_below_0", "rope.freq_base", _llama("rope.freq_base", F32, -10000.0)),
    ("a_rope_base_of_0", "rope.freq_base", _llama("rope.freq_base", F32, 0.0)),
    ("a_rope_base_that_is_none", "rope.freq_base", _llama("rope.freq_base", F32, math.nan)),
    ("a_rope_of_part_of_a_head", "rope.dimension_count", _llama("rope.dimension_count", U32, 8)),
    ("a_rope_factor_below_0", "rope.scaling.factor",
     _all(_llama("rope.scaling.type", STRING, "linear"), _llama("rope.scaling.factor", F32, -8.0))),
    ("a_rope_factor_of_words", "rope.scaling.factor", _llama("rope.scaling.factor", STRING, "8")),
    ("a_rope_factor_without_end", "rope.scaling.factor",
     _all(_llama("rope.scaling.type", STRING, "yarn"), _llama("rope.scaling.factor", F32, math.inf))),
    ("a_rope_that_is_not_known", "rope.scaling.type is 'dynamic'",
     _llama("rope.scaling.type", STRING, "dynamic")),
    ("a_rope_of_a_number", "rope.scaling.type", _llama("rope.scaling.type", U32, 1)),
    ("rope_factors_of_0", "rope_freqs.weight", _more(b"rope_freqs.weight", [8])),
    ("rope_factors_below_0", "rope_freqs.weight",
     _more(b"rope_freqs.weight", [8], struct.pack("<8f", *[-1.0] * 8))),
    ("rope_factors_of_half_a_head_more", "rope_freqs.weight", _more(b"rope_freqs.weight", [16])),
    ("a_setting_that_is_not_known", "llama.attention.scale", _llama("attention.scale", F32, 2.0)),
    ("experts_in_a_dense_model", "'blk.0.ffn_up_exps.weight' is missing", _llama("expert_count", U32, 8)),
    ("experts_in_a_dense_qwen", "qwen3.expert_count",
     _all(_renamed("qwen3"), _value("qwen3.expert_count", U32, 8))),
    ("more_experts_than_there_are", "expert_used_count is 5", _all(
        _mixtral, _llama("expert_used_count", U32, 5))),
    ("no_expert_is_used", "expert_used_count", _all(_mixtral, _llama("expert_used_count", U32, 0))),
    ("experts_of_another_width", "feed_forward_length is 95", _all(
        _mixtral, _llama("feed_forward_length", U32, WIDE - 1))),
    ("experts_without_a_router", "'blk.1.ffn_gate_inp.weight' is missing", _all(
        _mixtral, lambda f: f.leave("blk.1.ffn_gate_inp.weight"))),
    ("a_mixtral_with_biases", "biases of attention", _all(
        _mixtral, *(_more(f"blk.0.attn_{part}.bias".encode(), [size])
                    for part, size in (("q", 64), ("k", 32), ("v", 32))))),
    ("experts_that_are_shared", "llama.expert_shared_count", _all(
        _mixtral, _llama("expert_shared_count", U32, 1))),
    ("gpt_oss_without_sinks", "'blk.1.attn_sinks.weight' is missing", _all(
        _gpt_oss, lambda f: f.leave("blk.1.attn_sinks.weight"))),
    ("gpt_oss_without_a_head", "'output.weight'", _all(_gpt_oss, lambda f: f.leave("output.weight"))),
    ("gpt_oss_without_a_window", "attention.sliding_window is 0", _all(
        _gpt_oss, _value("gpt-oss.attention.sliding_window", U32, 0))),
    ("gpt_oss_of_two_bases", "rope.freq_base_swa", _all(
        _gpt_oss, _value("gpt-oss.rope.freq_base_swa", F32, 5.0))),
    ("gpt_oss_without_biases", "no biases of attention", _all(_gpt_oss, *(
        (lambda f, name=f"blk.{layer}.attn_{part}.bias": f.leave(name))
        for layer in range(2) for part in ("q", "k", "v", "output")))),
    ("a_part_of_a_head_that_is_odd", "rope.dimension_count is 3", _all(
        _phi, _value("phi3.rope.dimension_count", U32, 3))),
    ("long_factors_alone", "rope_factors_short.weight", _all(
        _phi, _more(b"rope_factors_long.weight", [8]))),
    ("a_factor_of_attention_alone", "attn_factor without rope_factors_long", _all(
        _phi, _value("phi3.rope.scaling.attn_factor", F32, 1.2))),
    ("factors_of_another_number", "rope_factors_long.weight: wanted 8", _all(
        _phi, _more(b"rope_factors_long.weight", [4]), _more(b"rope_factors_short.weight", [4]))),
    ("a_norm_that_is_missing", "blk.1.ffn_norm.weight", lambda f: f.leave("blk.1.ffn_norm.weight")),
    ("an_embedding_that_is_missing", "token_embd.weight", lambda f: f.leave("token_embd.weight")),
    ("a_norm_of_two_dimensions", "blk.0.attn_norm.weight", _tensor(_NORM, shape=[1, HIDDEN])),
    ("a_matrix_the_other_way_round", "feed_forward_length",
     _tensor("blk.0.ffn_up.weight", shape=[HIDDEN, WIDE])),
    ("a_bias_of_one_of_three", "biases", _more(b"blk.0.attn_q.bias", [64])),
    ("a_first_token_beyond_the_table", "bos_token_id", _tokenizer("bos_token_id", U32, VOCABULARY)),
    ("a_last_token_below_0", "eos_token_id", _tokenizer("eos_token_id", I32, -1)),
    ("a_last_token_of_words", "eos_token_id", _tokenizer("eos_token_id", STRING, "</s>")),
]  # fmt: skip

TOKENIZER = [
    ("no_kind_of_tokenizer", "tokenizer.ggml.model", lambda f: f.drop("tokenizer.ggml.model")),
    ("another_kind_of_tokenizer", "'bert'", _tokenizer("model", STRING, "bert")),
    ("another_way_to_cut", "tokenizer.ggml.pre", _tokenizer("pre", STRING, "deepseek-v3")),
    ("no_tokens", "tokenizer.ggml.tokens is missing", lambda f: f.drop("tokenizer.ggml.tokens")),
    ("tokens_of_numbers", "tokenizer.ggml.tokens is another type",
     _tokenizer("tokens", ARRAY, Array(U8, [1] * VOCABULARY))),
    ("a_token_too_few", "31 tokens", _all(_tokens(lambda t: t.pop()), _types(_GIVEN[:-1]))),
    ("a_token_too_many", "33 tokens", _all(_tokens(lambda t: t.append("more")), _types([*_GIVEN, 1]))),
    ("a_type_too_few", "31 types", _types(_GIVEN[:-1])),
    ("a_type_of_no_token", "wanted 1 to 6", _types([7, *_GIVEN[1:]])),
    ("a_type_below_0", "wanted 1 to 6", _types([-1, *_GIVEN[1:]])),
    ("a_token_twice", "is there twice", _tokens(lambda t: t.__setitem__(9, "w10"))),
    ("an_empty_token", "wanted a name in UTF-8", _tokens(lambda t: t.__setitem__(9, ""))),
    ("a_token_that_is_no_utf8", "wanted a name in UTF-8",
     _tokens(lambda t: t.__setitem__(9, b"\xed\xa0\x80"))),
    ("no_merges", "tokenizer.ggml.merges is missing", lambda f: f.drop("tokenizer.ggml.merges")),
    ("a_merge_of_an_unknown_token", "merge 'a nothing'", _merges("a nothing")),
    ("a_merge_that_makes_no_token", "merge 'c a'", _merges("c a")),
    ("a_merge_of_one_token", "merge 'ab'", _merges("ab")),
    ("a_merge_that_is_no_utf8", "merge", _merges(b"\xff \xfe")),
    ("scores_that_are_none", "score nan",
     _all(_PIECES, _tokenizer("scores", ARRAY, Array(F32, [math.nan] * VOCABULARY)))),
    ("a_score_too_few", "tokenizer.ggml.scores has 31",
     _all(_PIECES, _tokenizer("scores", ARRAY, Array(F32, [0.0] * (VOCABULARY - 1))))),
    ("no_scores", "tokenizer.ggml.scores is missing", _PIECES),
    ("a_flag_of_a_number", "add_bos_token: wanted a bool", _tokenizer("add_bos_token", U32, 1)),
    ("a_first_token_that_is_not_named", "whose number",
     _all(lambda f: f.drop("tokenizer.ggml.bos_token_id"), _tokenizer("add_bos_token", BOOL, 1))),
    ("an_unknown_token_beyond_the_table", "unknown_token_id", _tokenizer("unknown_token_id", U32, 2**31)),
    ("a_template_that_is_no_utf8", "chat_template", _value("tokenizer.chat_template", STRING, b"\x80")),
    ("a_template_of_a_number", "chat_template", _value("tokenizer.chat_template", U32, 1)),
    ("a_setting_of_no_tokenizer", "tokenizer.ggml.precompiled_charsmap",
     _tokenizer("precompiled_charsmap", ARRAY, Array(U8, [0]))),
]  # fmt: skip

VALUES = [
    ("a_scale_that_is_none", _Q, _bytes(_Q, 34 * 5, _NAN16)),
    ("a_scale_without_end", _Q, _bytes(_Q, 34 * 5, _INF16)),
    ("a_norm_that_is_none", _NORM, _bytes(_NORM, 12, struct.pack("<f", math.nan))),
    ("a_token_without_end", "token_embd.weight",
     _bytes("token_embd.weight", 400, struct.pack("<f", -math.inf))),
]  # fmt: skip


# Odd and right: the values are those of the plain file.
ACCEPTED = [
    ("as_it_is", lambda f: None),
    ("version_2", _field("version", 2)),
    ("alignment_1", _all(_value("general.alignment", U32, 1), _field("alignment", 1))),
    ("alignment_2", _all(_value("general.alignment", U32, 2), _field("alignment", 2))),
    ("alignment_of_a_megabyte", _all(_value("general.alignment", U64, 2**20), _field("alignment", 2**20))),
    ("counts_of_8_and_64_bits", _all(_llama("block_count", U8, 2), _llama("embedding_length", I64, 64))),
    ("a_base_of_64_bits", _llama("rope.freq_base", F64, 10000.0)),
    ("a_name_with_zero_bytes", _value("general.name", STRING, "a\0b")),
    ("a_title_that_is_no_utf8", _value("general.name", STRING, b"\xff\xfe")),
    ("a_key_with_a_zero_byte", _value("general.x\0y", U32, 1)),
    ("a_bool_of_7", _value("general.odd", BOOL, 7)),
    ("an_empty_array", _value("general.empty", ARRAY, Array(STRING, []))),
    ("a_pair_of_a_million_bytes", _value("general.long", STRING, "x" * 1_000_000)),
    ("tensors_the_other_way_round", lambda f: f.tensors.reverse()),
]  # fmt: skip
