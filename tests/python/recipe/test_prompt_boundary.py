"""Prompts and answers: worded in one pass, tokens of the whole text at their boundary, asked as trained."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from monograph.recipe import check_keys
from monograph.recipe.data.document import joined
from monograph.recipe.data.documents import prompt_of
from monograph.recipe.data.encode import encode, load_tokenizer, prompt_tokens
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run import generate
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

TEXT = "### Response: Yes no the answer is 42 and Hello world [INST] what is [/INST]\n"
BRACKETS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def sentence_piece(kind):
    """A BPE tokenizer that writes spaces as SentencePiece does; kind: Metaspace's scheme, or Llama 2's."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if kind == "llama2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator([TEXT] * 50, trainer)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


BOUNDARIES = [
    ("### Response: ", "Yes"),
    ("### Response:", " Yes"),
    ("### Response:\n", "Yes"),
    ("### Response:", "Yes"),
]


@pytest.mark.parametrize("kind", ["first", "always", "llama2"])
@pytest.mark.parametrize(("prompt", "answer"), BOUNDARIES)
def test_tokens_are_those_of_the_whole_text(kind, prompt, answer):
    tokenizer = sentence_piece(kind)
    encoded = encode(joined([(prompt, False), (answer, True)]), tokenizer)
    assert encoded.input_ids == [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
    targets = [token for token in encoded.labels if token != -100]
    assert tokenizer.decode(targets[:-1]).strip().endswith("Yes")
    assert targets[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["first", "always"])
def test_a_prompt_alone_has_the_tokens_of_training(kind):
    """The space at its end is that of the answer's first token."""
    tokenizer = sentence_piece(kind)
    encoded = encode(joined([("### Response: ", False), ("Yes", True)]), tokenizer)
    given = [token for token, label in zip(*encoded, strict=True) if label == -100]
    assert prompt_tokens("### Response: ", tokenizer, begins=True) == given


def test_tokenizers_that_cut_cleanly_still_cut(tmp_path):
    for tokenizer in (sentence_piece("never"), make_tokenizer(tmp_path, texts=["Response: Yes"] * 50)):
        encoded = encode(joined([("### Response: ", False), ("Yes", True)]), tokenizer)
        given = [token for token, label in zip(*encoded, strict=True) if label == -100]
        assert given == tokenizer("### Response: ")["input_ids"]
        assert given == prompt_tokens("### Response: ", tokenizer, begins=True)


def test_placeholders_inside_data_stay():
    prompt = prompt_of("alpaca")
    assert "an f-string with {input} and {system} in" in prompt.prompt(
        "an f-string with {input} and {system} in"
    )
    assert "Explain {input}\n" in prompt.prompt("Explain {input}", "SECRET")
    named = prompt_of({"format": "{system}|{input}|{instruction}|{", "system_prompt": "{instruction}"})
    assert named.prompt("{system}", "{instruction}") == "{instruction}|{instruction}|{system}|{"


def test_generate_asks_with_the_template_of_the_dataset(tmp_path):
    make_tokenizer(tmp_path / "model", chat_template=BRACKETS)
    make_model(tmp_path / "model")
    chat = [{"role": "user", "content": "name?"}, {"role": "assistant", "content": "Ada"}]
    path = write_jsonl(tmp_path / "train.jsonl", [{"messages": chat}])
    data = [{"path": path, "type": "chat_template", "chat_template": "chatml"}]
    keys = small_recipe(tmp_path, "chat_template", datasets=data, eot_tokens=["<|im_end|>"])
    recipe = check_keys(keys).recipe
    tokenizer = load_tokenizer(recipe, recipe.base_model)
    trained = prepare(recipe, tokenizer).train[0]
    given = [token for token, label in zip(trained["input_ids"], trained["labels"], strict=True) if label < 0]
    asked = generate.Generator(recipe, None).tokens("name?")[0].tolist()
    assert asked == given[: len(asked)]
    assert tokenizer.decode(asked).endswith("<|im_start|>assistant\n")
