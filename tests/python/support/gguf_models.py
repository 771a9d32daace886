"""Tiny models with tokenizers of their own, one of each kind that `monograph export --to gguf` carries.

Byte-level BPE is trained here; sentencepiece's BPE is what transformers makes of a sentencepiece model: a
merge for each way to cut a token into two tokens, in the order of the tokens.
"""

import pathlib
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel, TemplateProcessing

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = WORDS % "{1,3}", WORDS % ""
_UPPER, _LOWER = (rf"[\p{{L{letter}}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for letter in "ul")
_LOWER = _LOWER.replace(r"\p{Lt}", "")
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog's 1234 dreams aren't over.\n\n  It's 5! "
PROMPT = "The dog's 2468 dreams,\n  aren't brown: café ☃"
VOCABULARY = 400
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    "Mistral": WIDE | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "Qwen3": WIDE
    | {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32,
        }
    },
    "Gemma3": WIDE
    | {
        "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 7,
    },
    "Qwen3Moe": WIDE
    | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "Mixtral": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    # Half of each head turns: 4 factors for long texts and 4 for short ones.
    "Phi3": {
        "max_position_embeddings": 512, "original_max_position_embeddings": 256, "sliding_window": 100,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0, 1.1, 1.25, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
    "GptOss": WIDE
    | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
}  # fmt: skip


def byte_level(pattern: str, *, ignore_merges: bool, bos: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 20,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    else:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(*, prepend: bool) -> Tokenizer:
    blank = "\u2581"
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [TEXT.replace(" ", blank).replace("\n", "")] * 4,
        trainers.BpeTrainer(vocab_size=90, show_progress=False),
    )
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + pieces:
        vocab[token] = len(vocab)
    merges = [
        (token[:i], token[i:])
        for token in pieces
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", blank)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(blank), replace]) if prepend else replace
    if not prepend:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken(blank * 3, normalized=False)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def tokenizer_of(name: str) -> Tokenizer:
    if name == "Llama":
        return byte_level(LLAMA3, ignore_merges=True, bos=True)
    if name.startswith("Qwen"):
        return byte_level(QWEN2, ignore_merges=False, bos=False)
    if name == "GptOss":
        tokenizer = byte_level(O200K, ignore_merges=False, bos=True)
        tokenizer.post_processor = ByteLevel(trim_offsets=False)
        return tokenizer
    return sentencepiece(prepend=name in ("Mistral", "Mixtral", "Phi3"))


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 4, **settings: Any) -> Any:
    """In fp32, with values of `dtype`."""
    torch.manual_seed(seed)
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, kind + "Config")(**(COMMON | SETTINGS[name] | settings))
    model = getattr(transformers, name + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.12 if parameter.dim() > 1 else 0.05
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.to(dtype).float().eval()


def save(model: Any, name: str, folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> Tokenizer:
    """The folder as transformers writes it."""
    tokenizer = tokenizer_of(name)
    model.to(dtype).save_pretrained(folder)
    model.float()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return tokenizer
