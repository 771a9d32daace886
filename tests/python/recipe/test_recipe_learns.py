"""It learns: a small Llama, pretrained here and quantised, answers a new task after tuning, not before, and
learns it as transformers, PEFT and bitsandbytes do."""

import io
import json
import os
import sys

import pytest
import torch

from monograph.__main__ import main
from monograph.nn import QuantLinear
from monograph.recipe import check_keys
from monograph.recipe.run.generate import Generator, Sampling
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.train import train
from support import learning, tutorial

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The commands of the tutorial, run in order in a folder of their own: (command, shown, printed)."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("world"))
    yield [(command, output, tutorial.run(command)) for command, output in tutorial.shown()]
    os.chdir(before)


@pytest.fixture(scope="module")
def world(replayed):
    """Keys, questions held back and path of the recipe, after training."""
    return learning.open_world("tiny")


@pytest.fixture(scope="module")
def tuned(world):
    recipe = check_keys(world[0]).recipe
    return Generator(recipe, recipe.output_dir)


def nothing(text):
    pass


def test_the_tutorial_shows_what_happens(replayed):
    assert [command.split()[3] for command, *_ in replayed if command.startswith("python")] == [
        "example",
        "preprocess",
        "generate",
        "train",
        "generate",
        "merge",
        "train",
    ]
    for command, shown, printed in replayed:
        if "--base" in command:  # what a model says that was not taught depends on every bit of it
            answer = " ".join(tutorial.machine_independent(command, printed))
            assert 0 < len(answer.split()) <= 12
            continue
        want = tutorial.machine_independent(command, shown)
        assert tutorial.machine_independent(command, printed) == want, command


def test_it_answers_after_training_and_not_before(world, tuned):
    keys, asked, _ = world
    before = learning.exact_match(Generator(check_keys(keys).recipe, None), asked)
    assert before <= 0.05
    assert learning.exact_match(tuned, asked) >= 0.95


LONG = [pytest.param(format, marks=pytest.mark.long) for format in ("fp8-block", "mxfp8", "nvfp4")]


@pytest.mark.parametrize("format", ["mxfp4", *LONG])
def test_it_learns_on_a_base_in_each_format(world, tmp_path, format):
    """The pretrained model as a quantised folder, trained by the same recipe; and merged."""
    keys, asked, _ = world
    folder = learning.quantised_folder(keys["base_model"], tmp_path / "model", format)
    recipe = keys | {"base_model": str(folder), "output_dir": str(tmp_path / "out")}
    assert learning.exact_match(Generator(check_keys(recipe).recipe, None), asked[:10]) <= 0.05
    train(check_keys(recipe).recipe)
    record = json.loads((tmp_path / "out" / "monograph.json").read_text())
    assert record["base"]["weights"] == "dequantized"
    generator = Generator(check_keys(recipe).recipe, str(tmp_path / "out"))
    layers = [layer for layer in generator.model.modules() if isinstance(layer, QuantLinear)]
    assert len(layers) == 28
    assert {layer.format.name for layer in layers} == {"nvfp4-divide" if format == "nvfp4" else format}
    assert learning.exact_match(generator, asked) >= 0.95
    generator.model = generator.model.merge_and_unload()
    assert not any(isinstance(layer, QuantLinear) for layer in generator.model.modules())
    assert learning.exact_match(generator, asked[:20]) >= 0.95


def test_merged_into_the_base_it_answers_too(world):
    keys, asked, _ = world
    recipe = check_keys(keys).recipe
    generator = Generator(recipe, recipe.output_dir)
    generator.model = generator.model.merge_and_unload()
    assert not any("lora" in name for name, _ in generator.model.named_parameters())
    assert learning.exact_match(generator, asked[:20]) >= 0.95


@pytest.mark.long
def test_the_loss_curve_is_that_of_the_peers_within_noise(world):
    """Noise: how far two runs of the peers lie apart that differ by their seed alone."""
    keys = world[0]
    ours = [line["loss"] for line in read_metrics(f"{keys['output_dir']}/metrics.jsonl")][:60]
    peers = learning.peer_losses(check_keys(keys).recipe, 60)
    other = learning.peer_losses(check_keys(keys).recipe, 60, seed=43)

    def distance(one, two):
        return sum(abs(a - b) for a, b in zip(one, two, strict=True)) / len(one)

    assert ours[0] == pytest.approx(peers[0], rel=0.01)  # the same weights, data and adapter at the start
    assert distance(ours, peers) < distance(peers, other)


def test_generate_streams_the_answer(world, tuned, capsys):
    _, asked, recipe = world
    assert main(["generate", recipe, "--prompt", asked[0]["instruction"], "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == asked[0]["output"] + "\n"
    pieces = []
    tokens = tuned.tokens(asked[0]["instruction"])
    text = tuned.answer(tokens, Sampling(max_new_tokens=8), pieces.append)
    assert "".join(pieces) == text == asked[0]["output"]
    assert [piece.strip() for piece in pieces if piece.strip()] == asked[0]["output"].split()


def test_prompts_come_from_standard_input_too(world, capsys, monkeypatch):
    _, asked, recipe = world
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked[1]["instruction"] + "\n"))
    assert main(["generate", recipe, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == asked[1]["output"] + "\n"


def test_the_cache_changes_nothing(world, tuned):
    tokens = tuned.tokens(world[1][2]["instruction"])
    text = tuned.answer(tokens, Sampling(max_new_tokens=4), nothing)
    ids = tokens
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat((ids, tuned.model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert tuned.tokenizer.decode(ids[0, tokens.shape[1] :], skip_special_tokens=True) == text


def test_sampling_is_a_function_of_the_seed(world, tuned):
    tokens = tuned.tokens("fox fox fox fox")  # no list: the model is not sure
    hot = {"temperature": 5.0, "max_new_tokens": 12}
    texts = [tuned.answer(tokens, Sampling(**hot, seed=seed), nothing) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = tuned.answer(tokens, Sampling(max_new_tokens=12), nothing)
    assert tuned.answer(tokens, Sampling(**hot, top_k=1, seed=3), nothing) == greedy
    assert tuned.answer(tokens, Sampling(**hot, top_p=1e-6, seed=3), nothing) == greedy


def test_a_repeated_token_is_made_less_likely(world, tuned):
    tokens = tuned.tokens(world[1][0]["instruction"])
    plain = tuned.answer(tokens, Sampling(max_new_tokens=8), nothing)
    assert tuned.answer(tokens, Sampling(max_new_tokens=8, repetition_penalty=1e6), nothing) != plain


def test_chats_are_worded_by_the_template(world):
    keys = world[0] | {"chat_template": "chatml", "default_system_message": "be short"}
    recipe = check_keys(keys | {"eot_tokens": ["<|im_end|>"]}).recipe
    generator = Generator(recipe, None, "chat")
    history = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    text = generator.tokenizer.decode(generator.tokens("cat", history)[0])
    assert text == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nfox<|im_end|>\n"
        "<|im_start|>assistant\ndog<|im_end|>\n<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_an_adapter_it_says_so(world, tmp_path, capsys):
    assert main(["generate", world[2], "--prompt", "fox", "--output-dir", str(tmp_path)]) == 3
    assert "there is no adapter in output_dir" in capsys.readouterr().err
    arguments = ["--output-dir", str(tmp_path), "--base", "--max-new-tokens", "2"]
    assert main(["generate", world[2], "--prompt", "fox", *arguments]) == 0
