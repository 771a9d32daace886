"""mg.from_pretrained of a GGUF file alone: settings, ids, weights as they lie, a step, what is refused."""

import copy
import re
import struct

import pytest
import torch
import transformers
from peft import LoraConfig

import monograph as mg
from monograph.hf.transformers.gguf_folder import gguf_folder
from monograph.memory.mapped_memory import MappedMemory
from monograph.nn import PackedEmbedding, QuantLinear
from monograph.training import TrainStep
from support.gguf_bases import mixed_base
from support.gguf_models import PROMPT, TEXT

FAMILIES = ["Llama", "Mistral", "Qwen3", "Gemma3"]
READ = [*FAMILIES, "Qwen2", "Phi3"]
MATRICES = {"Phi3": 4}  # of a layer; 7 of the others
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {name: mixed_base(name, tmp_path_factory.mktemp(name)) for name in READ}


def packed_parts(model):
    kinds = (QuantLinear, PackedEmbedding)
    return {path: part for path, part in model.named_modules() if isinstance(part, kinds)}


def loaded(file, **options):
    return mg.from_pretrained(file, dtype=torch.float32, **options)


@pytest.mark.parametrize("name", READ)
def test_weights_are_those_of_the_file(bases, name):
    file, wanted = bases[name]
    model = loaded(file)
    state = wanted.state_dict()
    packed = {
        path: part for path, part in model.named_modules() if isinstance(part, (QuantLinear, PackedEmbedding))
    }
    layers = len(model.model.layers)
    assert len(packed) == MATRICES.get(name, 7) * layers + 2  # the table and the head too
    few = {"q4_k", "q5_k", "q6_k"}
    wanted_formats = few if name == "Phi3" else few | {"q5_0", "iq4_xs"}
    assert {part.format.name for part in packed.values()} == wanted_formats
    for path, part in packed.items():
        assert torch.equal(part.packed.dequantize(torch.float32), state[f"{path}.weight"]), path
    for path, parameter in model.named_parameters():
        if parameter.dtype is not torch.uint8:
            atol = 2e-6 if name == "Gemma3" else 0  # norms are stored as one plus the weight
            torch.testing.assert_close(parameter.data, state[path], rtol=0, atol=atol, msg=path)
    assert torch.equal(model.get_input_embeddings()(IDS), wanted.get_input_embeddings()(IDS))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_and_tokens_are_those_of_the_folder(bases, name):
    file, _ = bases[name]
    before = transformers.AutoConfig.from_pretrained(file.parent / "model").to_dict()
    after = transformers.AutoConfig.from_pretrained(gguf_folder(file)).to_dict()
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    allowed = {"_name_or_path", "quantization_config", "dtype"}
    if name == "Mistral":  # llama.cpp's "llama" is both
        allowed |= {
            "model_type",
            "architectures",
            "sliding_window",
            "mlp_bias",
            "attention_bias",
            "pretraining_tp",
        }
    assert differ <= allowed
    old, new = (
        transformers.AutoTokenizer.from_pretrained(f) for f in (file.parent / "model", gguf_folder(file))
    )
    assert new(PROMPT).input_ids == old(PROMPT).input_ids
    assert new(TEXT).input_ids == old(TEXT).input_ids
    assert new.chat_template == old.chat_template


def test_every_byte_stays_in_the_file(bases):
    model = mg.from_pretrained(bases["Llama"][0])
    with MappedMemory() as memory:
        for path, part in packed_parts(model).items():
            assert memory.extents(part.values.data_ptr(), part.values.nbytes), path
    assert model.name_or_path == str(bases["Llama"][0])


def test_a_tied_head_is_one_parameter(bases):
    file, wanted = bases["Gemma3"]
    assert wanted.config.tie_word_embeddings
    model = loaded(file)
    assert model.lm_head.values is model.model.embed_tokens.values
    assert sum("values" in name for name, _ in model.named_parameters()) == 7 * len(model.model.layers) + 1
    assert model.num_parameters() == wanted.num_parameters()
    tuned = mg.add_lora(model, LoraConfig(r=4, target_modules=["q_proj"]))
    trained, total = tuned.get_nb_trainable_parameters()
    assert total - trained == wanted.num_parameters()


def test_generation_is_that_of_the_decoded_model(bases):
    file, wanted = bases["Qwen3"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded(file).generate(IDS, **options), wanted.generate(IDS, **options))


def grads_of(model):
    torch.manual_seed(0)
    tuned = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    loss = tuned(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in tuned.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", READ)
def test_a_step_has_the_gradients_of_the_decoded_model(bases, name):
    """LoRA on the blocks against LoRA on transformers' own layers with the decoded weights, float32."""
    file, wanted = bases[name]
    ours, theirs = grads_of(loaded(file)), grads_of(copy.deepcopy(wanted))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 1 + 2 * MATRICES.get(name, 7) * len(wanted.model.layers)
    for key, found in ours.items():
        assert (found - theirs[key]).norm() <= 1e-3 * theirs[key].norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_trained_in_one_graph_and_the_file_keeps_its_bytes(bases, name):
    file, _ = bases[name]
    before = file.read_bytes()
    torch.manual_seed(0)
    model = mg.add_lora(mg.from_pretrained(file), LoraConfig(r=4, target_modules="all-linear"))
    step = TrainStep(model)
    batch = {"input_ids": IDS, "labels": IDS}
    losses = [step([batch], 5e-3).loss.item() for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0], losses
    assert file.read_bytes() == before
    with MappedMemory() as memory:  # a page that was written to is no page of the file
        for path, part in packed_parts(model).items():
            assert memory.extents(part.values.data_ptr(), part.values.nbytes), path
    report = mg.doctor(model, [batch, batch])
    assert not [*report.breaks, *report.recompiles, *report.weight_copies]


def test_a_dense_copy_is_made_when_asked_for(bases, tmp_path):
    file, wanted = bases["Gemma3"]
    model = loaded(file)
    with pytest.raises(ValueError, match="which no quant method saves"):
        model.save_pretrained(tmp_path / "packed")
    dense = model.dequantize()
    with torch.no_grad():
        torch.testing.assert_close(dense(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-3)
    assert not packed_parts(dense)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_plain_floats(bases, name):
    """A file in f32: the order of rows and the norms; it may be quantised while it loads."""
    file = bases[name][0].parent / "plain.gguf"
    wanted = transformers.AutoModelForCausalLM.from_pretrained(file.parent / "model", dtype=torch.float32)
    model = loaded(file, attn_implementation="sdpa")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=0, atol=2e-5)
    packed = loaded(file, quantization=mg.MonographConfig("nf4"))
    assert isinstance(packed.model.layers[0].self_attn.q_proj, QuantLinear)


def test_tokens_are_not_trained_in_a_packed_table(bases):
    file, _ = bases["Qwen3"]
    targets = {"r": 4, "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="trainable_token_indices: the table of tokens is packed"):
        mg.add_lora(loaded(file), LoraConfig(trainable_token_indices=[5], **targets))
    with pytest.raises(ValueError, match=r"modules_to_save names model\.embed_tokens"):
        mg.add_lora(loaded(file), LoraConfig(modules_to_save=["embed_tokens"], **targets))


def changed(file, tmp_path, old, new):
    raw = file.read_bytes()
    assert raw.count(old) >= 1
    made = tmp_path / "changed.gguf"
    made.write_bytes(raw.replace(old, new, 1))
    return made


def test_what_is_not_understood_is_refused_by_name(bases, tmp_path):
    file, _ = bases["Qwen3"]
    q4_k = struct.pack("<I", 12)
    name = b"blk.0.attn_q.weight" + struct.pack("<IQQ", 2, 256, 256)
    for old, new, message in (
        (b"\5\0\0\0\0\0\0\0qwen3", b"\5\0\0\0\0\0\0\0qwenX", "general.architecture 'qwenX'"),
        (name + q4_k, name + struct.pack("<I", 10), "type 10 (q2_k) is not read"),
        (name, name[:-16] + struct.pack("<QQ", 512, 128), "rows of heads is 256, by the tensors 128"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_X.weight", "blk.1.attn_"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            mg.from_pretrained(changed(file, tmp_path, old, new))
        assert "changed.gguf" in str(error.value)
    with pytest.raises(ValueError, match="already quantised"):
        mg.from_pretrained(file, mg.MonographConfig("nf4"))
