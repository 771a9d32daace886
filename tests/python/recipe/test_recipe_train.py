"""Training by recipe, eager on a two-layer Llama: data order, checkpoints, resume, what stops a run."""

import functools
import hashlib
import json
import math
import os
import shutil
import signal

import pytest
import torch

from monograph.__main__ import main
from monograph.ops.show_config import chosen_isa
from monograph.recipe import check_keys
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run import train as train_module
from monograph.recipe.run.batches import Batches
from monograph.recipe.run.checkpoint import checkpoints, write_folder
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.run.progress import Reporter
from monograph.recipe.run.schedule import Epochs, event_steps, learning_rate
from monograph.recipe.run.train import Run
from monograph.recipe.train import train
from monograph.training import TrainStep
from support.recipe_files import make_instruction_world, make_model, make_tokenizer, small_recipe, write_jsonl
from support.run_traces import adapter_bytes, trace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def keys(root, tmp_path):
    """keys(**change): a recipe of 8 steps, as a mapping."""
    base = small_recipe(
        root,
        "instruction",
        output_dir=str(tmp_path / "out"),
        lora_dropout=0.05,
        torch_compile=False,
        num_epochs=2,
        micro_batch_size=2,
    )
    return lambda **change: base | change


@pytest.fixture
def recipe(keys):
    return lambda **change: check_keys(keys(**change)).recipe


def test_the_learning_rate_is_a_function_of_the_step(recipe):
    flat = recipe(lr_scheduler="constant", warmup_ratio=0.5)
    assert {learning_rate(flat, step, 10) for step in range(10)} == {0.01}
    linear = recipe(lr_scheduler="linear", warmup_steps=2)
    rates = [learning_rate(linear, step, 10) / 0.01 for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[3:] == pytest.approx([1 - n / 8 for n in range(1, 8)])
    cosine = recipe(warmup_ratio=0.2, cosine_min_lr_ratio=0.1)
    rates = [learning_rate(cosine, step, 10) / 0.01 for step in range(10)]
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 8)) / 2 for n in range(8)]
    assert rates == pytest.approx([0.5, 1.0, *expected])
    warm = recipe(lr_scheduler="constant_with_warmup", warmup_steps=4)
    assert [learning_rate(warm, step, 10) / 0.01 for step in (0, 3, 9)] == [0.25, 1.0, 1.0]


def test_events_fall_where_the_keys_say():
    epochs = Epochs([10, 7])
    assert [epochs.place(step) for step in (0, 9, 10, 16)] == [(0, 0), (0, 9), (1, 0), (1, 6)]
    assert (epochs.share(0), epochs.share(10), epochs.share(17)) == (0.0, 1.0, 2.0)
    assert Epochs([10, 7], last_whole=10).share(17) == pytest.approx(1.7)
    assert event_steps(epochs, 2, None) == {5, 10, 14, 17}
    assert event_steps(epochs, None, 6) == {6, 12}
    assert event_steps(epochs, None, 0.25) == {4, 8, 12, 16}
    assert event_steps(epochs, 100, None) == set(range(1, 18))
    assert event_steps(epochs, None, None) == set()


@pytest.mark.parametrize("cut", [{"max_steps": 2}, {"num_epochs": 0.5}, {"num_epochs": 1.5}])
def test_the_epoch_of_a_step_is_the_share_of_the_data(recipe, root, cut):
    """A run that is cut says the same of its steps as one that is not."""
    read = recipe(sample_packing=False, gradient_accumulation_steps=1, **cut)
    tokenizer = load_tokenizer(read, str(root / "model"))
    batches = Batches(read, prepare(read, tokenizer).train, tokenizer.pad_token_id, training=True)
    epochs, whole = batches.epochs(read), batches.sampler.steps(0)
    assert epochs.total % whole  # it is cut
    shares = [epochs.share(step) for step in range(epochs.total + 1)]
    assert shares == pytest.approx([step / whole for step in range(epochs.total + 1)])


@pytest.mark.parametrize("packing", [True, False])
def test_every_document_is_seen_once_an_epoch_in_an_order_of_its_own(recipe, root, packing):
    read = recipe(sample_packing=packing, gradient_accumulation_steps=3, num_epochs=2.5)
    tokenizer = load_tokenizer(read, str(root / "model"))
    documents = prepare(read, tokenizer).train

    def epoch(number):
        batches = Batches(read, documents, tokenizer.pad_token_id, training=True)
        return [
            batch for step in range(batches.sampler.steps(number)) for batch in batches.step(number, step)
        ]

    def targets(batches):
        return sorted(int(t) for batch in batches for t in batch["labels"].flatten() if t != -100)

    wanted = sorted(label for labels in documents["labels"] for label in labels[1:] if label != -100)
    first, again, second = epoch(0), epoch(0), epoch(1)
    assert targets(first) == targets(second) == wanted
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    assert len({batch["input_ids"].shape[0] for batch in first}) == 1  # the last one too
    if packing:
        assert {batch["input_ids"].shape for batch in first} == {(1, 128)}
        assert len({batch["cu_seqlens"].shape for batch in first}) == 1
    steps = Batches(read, documents, 0, training=True).epochs(read)
    assert len(steps.lengths) == 3
    assert steps.lengths[2] == round(steps.lengths[0] / 2)


def test_a_run_writes_what_peft_reads(recipe, root):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import monograph as mg

    read = recipe(val_set_size=8, evals_per_epoch=2, saves_per_epoch=1, save_total_limit=1)
    outcome = train(read)
    out = read.output_dir
    assert (outcome.step, outcome.interrupted) == (outcome.total, False)
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "loss.png",
        "monograph.json",
    } <= set(os.listdir(out))
    losses = [line["loss"] for line in trace(out) if "loss" in line]
    evals = {line["step"]: line["eval_loss"] for line in trace(out) if "eval_loss" in line}
    assert len(losses) == outcome.total
    assert list(evals) == [2, 4, 6, 8]
    assert losses[-1] < losses[0]
    # In between they may rise: another transformers begins with other weights. The best is kept, too.
    assert evals[8] < evals[2]
    assert list(checkpoints(out)) == sorted({min(evals, key=evals.__getitem__), outcome.total})

    # The names are PEFT's own, and so is what the adapter does: on a base that PEFT alone handles, too.
    with open(os.path.join(out, "adapter_config.json")) as file:
        config = json.load(file)
    assert (config["peft_type"], config["r"], config["task_type"]) == ("LORA", 4, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(root / "model")
    assert len(load_file(os.path.join(out, "adapter_model.safetensors"))) == 2 * 7 * 2
    ids = torch.arange(10, 30)[None]
    base = mg.from_pretrained(str(root / "model"), mg.MonographConfig("nf4", double_quant=True))
    before = base(ids).logits
    mine = PeftModel.from_pretrained(base, out)
    after = mg.optimize(mine).eval()(ids).logits
    assert not torch.equal(before, after)
    dense = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    for name, layer in base.named_modules():
        if isinstance(layer, mg.nn.QuantLinear):
            plain = name.replace("base_model.model.", "").replace(".base_layer", "")
            dense.get_submodule(plain).weight.data = layer.dequantize(torch.float32)
    peft = PeftModel.from_pretrained(dense, out).eval()
    # bf16 activations through two layers of seven products each: a few units of 2^-8 of the whole.
    difference = (peft(ids).logits - after.float()).norm()
    assert difference <= 8 * 2**-8 * after.float().norm()
    assert difference <= 0.2 * (after - before).float().norm()

    with open(os.path.join(out, "monograph.json")) as file:
        record = json.load(file)
    assert (record["schema_version"], record["base"]["weights"]) == (1, "dequantized")
    lines = []
    for name, tensor in sorted(load_file(root / "model" / "model.safetensors").items()):
        digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        lines.append(f'"{name}" BF16 {list(tensor.shape)} {digest}\n')
    assert record["base"]["sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_packed_and_padded_evaluation_give_one_loss(recipe, root):
    found = {}
    for packing in (True, False):
        read = recipe(val_set_size=8, eval_sample_packing=packing, max_steps=1, eval_steps=1)
        train(read)
        (found[packing],) = [line["eval_loss"] for line in trace(read.output_dir) if "eval_loss" in line]
    # The same documents, each with the same arithmetic; the sum over them is taken in another order.
    assert found[True] == pytest.approx(found[False], rel=1e-5)


def test_padded_training_with_packed_evaluation(recipe, tmp_path, monkeypatch):
    """Training has batches of two rows, evaluation of one that is not padded to two."""
    keys = {"sample_packing": False, "val_set_size": 9, "max_steps": 1, "eval_steps": 1}
    keys |= {"attn_implementation": "sdpa"}

    def evaluated(**change):
        read = recipe(**keys, **change)
        assert read.attention == ("monograph" if read.packs_evaluation else "sdpa")
        train(read)
        (loss,) = [line["eval_loss"] for line in trace(read.output_dir) if "eval_loss" in line]
        return loss

    make_tokenizer(tmp_path / "model")
    make_model(tmp_path / "model", num_hidden_layers=1)
    keys["base_model"] = str(tmp_path / "model")
    padded, packed = evaluated(eval_sample_packing=False), evaluated(eval_sample_packing=True)
    # bf16 activations under another attention in one layer; documents that saw each other differ by more.
    assert packed == pytest.approx(padded, rel=2**-8)
    monkeypatch.setattr(train_module, "TrainStep", functools.partial(TrainStep, backend="aot_eager"))
    assert evaluated(eval_sample_packing=True, torch_compile=True) == packed


def stop_at(monkeypatch, step):
    """Sends this process what Ctrl-C sends, during a step."""
    ordinary = Reporter.step

    def interrupted(self, *arguments):
        if self._done + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return ordinary(self, *arguments)

    monkeypatch.setattr(Reporter, "step", interrupted)


def test_ctrl_c_saves_and_resume_gives_the_bits_of_an_unbroken_run(keys, tmp_path, monkeypatch, capsys):
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(keys(val_set_size=8, evals_per_epoch=2, gradient_accumulation_steps=2)))
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    assert main(["train", str(path), "--output-dir", whole]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert main(["train", str(path), "--output-dir", broken]) == 130
    assert "stopped after step 3; saved" in capsys.readouterr().err
    assert not os.path.exists(os.path.join(broken, "adapter_model.safetensors"))
    arguments = ["--output-dir", broken, "--resume-from-checkpoint", "auto"]
    assert main(["train", str(path), *arguments]) == 0
    assert "resumed from" in capsys.readouterr().err
    assert trace(broken) == trace(whole)
    assert adapter_bytes(broken) == adapter_bytes(whole)


def test_resume_refuses_other_data_another_base_and_no_checkpoint(recipe, root, tmp_path):
    train(recipe(max_steps=2, save_steps=1))
    again = recipe(max_steps=3, resume_from_checkpoint="auto")
    assert train(again).step == 3
    with pytest.raises(ValueError, match=r"seed is 1, the run of .*checkpoint-3 has 42"):
        train(recipe(seed=1, resume_from_checkpoint=True))
    make_tokenizer(tmp_path / "other")
    make_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="was trained on another base"):
        train(recipe(base_model=str(tmp_path / "other"), resume_from_checkpoint=True))
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        train(recipe(resume_from_checkpoint="nowhere"))
    with pytest.raises(ValueError, match=r"has no trainer_state.json; wanted a folder checkpoint-N"):
        train(recipe(resume_from_checkpoint=str(root)))


def test_resume_refuses_another_config_of_the_same_tensors(recipe, root, tmp_path, monkeypatch):
    base = tmp_path / "base"
    shutil.copytree(recipe().base_model, base)
    again = {"base_model": str(base), "save_steps": 1}
    train(recipe(max_steps=1, **again))
    monkeypatch.setattr("monograph.recipe.run.train.load_model", lambda *_: pytest.fail("it was loaded"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"config.json of base_model is '[0-9a-f]{64}', the run of "):
        train(recipe(max_steps=2, resume_from_checkpoint="auto", **again))
    (base / "config.json").write_text(json.dumps(config))  # other spaces are other bytes
    with pytest.raises(ValueError, match=r"config\.json of base_model"):
        train(recipe(max_steps=2, resume_from_checkpoint="auto", **again))


CHANGES = {
    "lora_alpha": 8,
    "lora_r": 8,
    "peft_use_rslora": True,
    "peft_use_dora": True,
    "bf16": False,
    "fp16": True,
    "adapter": "lora",
    "lora_dropout": 0.1,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "sequence_len": 128,
    "train_on_inputs": True,
    "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"},
}


def test_resume_refuses_another_run_and_names_the_key(keys, tmp_path, capsys, monkeypatch):
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(keys(max_steps=2, save_steps=1, lora_target_linear=False)))
    names = ["--lora-target-modules", "[q_proj, v_proj]"]
    assert main(["train", str(path), *names]) == 0
    names += ["--resume-from-checkpoint", "auto", "--max-steps", "3"]
    capsys.readouterr()
    for name, value in CHANGES.items():
        assert main(["train", str(path), *names, f"--{name}={json.dumps(value)}"]) == 3
        (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        key = "bnb_4bit_quant_type" if name == "bnb_config_kwargs" else name
        shown = "'fp4'" if name == "bnb_config_kwargs" else repr(value)
        assert message.startswith(f"error: resume_from_checkpoint: {key} is {shown}, the run of ")
    write_jsonl(tmp_path / "other.jsonl", [{"instruction": "What is 1?", "output": "2"}] * 40)
    other = ["--datasets.0.path", str(tmp_path / "other.jsonl")]
    assert main(["train", str(path), *names, *other]) == 3
    assert "files of datasets is '" in capsys.readouterr().err
    # What may change: names in another order, rates (said), output, the instruction set (said).
    was = chosen_isa()
    monkeypatch.setattr("monograph.recipe.run.run_identity.chosen_isa", lambda: "another")
    names[1] = "[v_proj, q_proj]"
    assert main(["train", str(path), *names, "--learning-rate", "0.001", "--logging-steps", "2"]) == 0
    said = capsys.readouterr().err
    assert "learning_rate is 0.001 from here on, was 0.01" in said
    assert "max_steps is 3 from here on, was 2" in said
    assert f"instruction set is 'another' from here on, was '{was}': the bits are not those" in said


def test_resume_refuses_other_tokens_of_the_same_lengths(recipe, tmp_path):
    """The files of the data are the same, and so are all lengths: the tokenizer in its folder is another."""
    folder = tmp_path / "model"
    make_tokenizer(folder)
    make_model(folder)
    keys = {"base_model": str(folder), "max_steps": 2, "save_steps": 1}
    train(recipe(**keys))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="resume_from_checkpoint: tokens of datasets is"):
        train(recipe(**keys | {"max_steps": 3}, resume_from_checkpoint="auto"))


@pytest.fixture
def worsening(tmp_path):
    """Keys with held back documents that training makes less likely: the first evaluation is the best."""
    rows = [{"text": "zzz qqq xxx jjj ~~~ ^^^ ||| @@@ %%% &&&"}] * 4
    path = write_jsonl(tmp_path / "other.jsonl", rows)
    keys = {"test_datasets": [{"path": path, "type": "completion"}], "eval_steps": 1}
    return keys | {"learning_rate": 0.05, "lr_scheduler": "constant"}


def test_the_best_checkpoint_stays_and_becomes_the_adapter(recipe, worsening):
    read = recipe(**worsening, save_steps=1, save_total_limit=2, max_steps=5, load_best_model_at_end=True)
    outcome = train(read)
    best = outcome.best_step
    assert best < 4, "the best one must lie before the two that are kept as the last"
    assert list(checkpoints(read.output_dir)) == [best, 4, 5]
    assert adapter_bytes(read.output_dir) == adapter_bytes(f"{read.output_dir}/checkpoint-{best}")


def test_a_resumed_run_takes_the_best_of_the_whole_run(recipe, worsening, tmp_path):
    """The best checkpoint lies before the one that the run goes on from, here or in that one's folder."""
    keys = worsening | {"save_steps": 1, "save_total_limit": 2, "load_best_model_at_end": True}
    whole = recipe(**keys, max_steps=5, output_dir=str(tmp_path / "whole"))
    best = train(whole).best_step
    wanted = adapter_bytes(whole.output_dir)
    broken = str(tmp_path / "broken")
    train(recipe(**keys, max_steps=4, output_dir=broken))
    assert best in checkpoints(broken)
    again = {"max_steps": 5, "resume_from_checkpoint": f"{broken}/checkpoint-4"}
    elsewhere = recipe(**keys, **again, output_dir=str(tmp_path / "elsewhere"))
    assert train(elsewhere).best_step == best
    assert adapter_bytes(elsewhere.output_dir) == wanted
    here = recipe(**keys, **again, output_dir=broken)
    assert train(here).best_step == best
    assert adapter_bytes(broken) == wanted
    shutil.rmtree(checkpoints(broken)[best])
    with pytest.raises(ValueError, match=f"checkpoint-{best}, the best checkpoint of the run of .*missing"):
        train(recipe(**keys, max_steps=6, output_dir=broken, resume_from_checkpoint="auto"))


def test_a_run_stops_early_or_when_the_loss_stays_high(recipe, worsening, capsys):
    assert train(recipe(**worsening, early_stopping_patience=2, num_epochs=4)).step < 6
    assert "stopped: no better eval_loss in 2 evaluations" in capsys.readouterr().err
    assert train(recipe(loss_watchdog_threshold=1.0, loss_watchdog_patience=2)).step == 2
    assert "stopped: loss above 1.0 for 2 steps" in capsys.readouterr().err


def test_a_zero_first_gradient_stops_and_says_so(recipe, tmp_path):
    make_tokenizer(tmp_path / "model")
    model = make_model(tmp_path / "model")
    torch.nn.init.zeros_(model.lm_head.weight)  # nothing reaches the adapter
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="the first gradient is zero: nothing would be learnt"):
        train(recipe(base_model=str(tmp_path / "model")))


def test_modules_to_save_are_trained_and_resumed(recipe, tmp_path):
    from safetensors.torch import load_file

    keys = {"lora_modules_to_save": ["lm_head"], "max_steps": 4, "save_steps": 2}
    whole = recipe(**keys, output_dir=str(tmp_path / "whole"))
    train(whole)
    names = load_file(os.path.join(whole.output_dir, "adapter_model.safetensors"))
    assert any("lm_head" in name for name in names)
    again = recipe(
        **keys,
        output_dir=str(tmp_path / "again"),
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"),
    )
    train(again)
    assert adapter_bytes(again.output_dir) == adapter_bytes(whole.output_dir)


def test_training_goes_on_from_an_adapter(recipe, tmp_path):
    first = recipe(output_dir=str(tmp_path / "first"))
    train(first)
    second = recipe(output_dir=str(tmp_path / "second"), lora_model_dir=first.output_dir)
    train(second)
    assert trace(second.output_dir)[0]["loss"] < trace(first.output_dir)[0]["loss"] - 0.1


def test_the_dense_base_and_the_attention_of_torch(recipe):
    read = recipe(adapter="lora", sample_packing=False, attn_implementation="sdpa", max_steps=2)
    assert train(read).step == 2
    float32 = recipe(bf16=False, sample_packing=False, pad_to_sequence_len=True, max_steps=2)
    assert train(float32).step == 2


def test_report_to_hands_every_line_to_the_tracker(recipe, monkeypatch):
    from accelerate import tracking

    seen = []

    class Listener(tracking.GeneralTracker):
        name = "listener"
        requires_logging_directory = False
        main_process_only = True

        def __init__(self, run_name, **options):
            super().__init__()
            seen.append(run_name)

        @property
        def tracker(self):
            return self

        def store_init_configuration(self, values):
            seen.append(values["lora_r"])

        def log(self, values, step=None, **options):
            seen.append((step, values["loss"]))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "listener", Listener)
    read = recipe(report_to="listener", max_steps=2)
    train(read)
    assert seen == ["monograph", 4, *((line["step"], line["loss"]) for line in trace(read.output_dir))]


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
def test_a_tracker_that_is_not_installed_is_named(recipe):
    with pytest.raises(ValueError, match="report_to: comet_ml is not installed"):
        train(recipe(report_to="comet_ml", max_steps=1))


def test_a_folder_is_there_wholly_or_not_at_all(tmp_path):
    def fails(folder):
        with open(os.path.join(folder, "half"), "w") as file:
            file.write("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(str(tmp_path / "checkpoint-1"), fails)
    assert checkpoints(str(tmp_path)) == {}
    write_folder(str(tmp_path / "checkpoint-1"), lambda folder: open(f"{folder}/a", "w").close())
    assert os.listdir(tmp_path / "checkpoint-1") == ["a"]
    assert list(checkpoints(str(tmp_path))) == [1]


def test_a_half_written_line_of_metrics_is_no_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(str(tmp_path / "metrics.jsonl")) == [{"step": 1}, {"step": 2}]


def test_inductor_options_hold_for_one_run(recipe, monkeypatch):
    import torch._inductor.config as inductor

    before, during = inductor.fx_graph_cache, []
    ordinary = Run.train
    monkeypatch.setattr(
        Run, "train", lambda self, *quiet: (during.append(inductor.fx_graph_cache), ordinary(self, *quiet))[1]
    )
    read = recipe(max_steps=1, torch_compile="auto", torch_compile_options={"fx_graph_cache": not before})
    read.torch_compile = False  # what is set is seen without the time to compile
    train(read)
    assert during == [not before]
    assert inductor.fx_graph_cache == before
