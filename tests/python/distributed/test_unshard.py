"""A sharded model outside of its forward, on two ranks: whole again, or refused by name."""

from __future__ import annotations

import copy
import hashlib
import pathlib
import tempfile
import time
from functools import partial

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

import monograph as mg
from monograph.distributed.save_full import save_pretrained
from monograph.distributed.shard import shard, sharded_units, units_of
from monograph.distributed.unshard import unshard, unsharded, whole_units
from monograph.nn import QuantLinear
from support.run_ranks import message, run_ranks
from support.tiny_models import save_llama

TOKENS = torch.arange(24).reshape(2, 12) * 13 % 320


def build(folder, **config):
    """The model of a folder with an adapter that does something; the same on every rank."""
    model = mg.from_pretrained(folder)
    torch.manual_seed(3)
    made = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", **config))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


def tensors(model):
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: digest(tensor) for name, tensor in named.items()}


def digest(tensor):
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(whole.numpy().data).hexdigest()}"


def files(folder):
    found = sorted(pathlib.Path(folder).glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def whole_again(world, model, same):
    """Inside `unsharded`: the tensors of the whole model, and forwards that need no other rank."""
    found = {}
    with unsharded(model):
        found["names and bytes inside"] = tensors(model) == tensors(same)
        found["no unit inside"] = not sharded_units(model)
        if world.first:  # a gather would wait for the other rank
            found["forward of one rank"] = torch.equal(logits(model), logits(same))
    found["cut again"] = bool(sharded_units(model))
    found["forward after"] = torch.equal(logits(model), logits(same))
    seen = {}
    for path, unit in whole_units(model):
        seen |= {f"{path}.{name}": digest(p) for name, p in unit.named_parameters()}
    own = tensors(same)
    found["one by one"] = all(own[name] == value for name, value in seen.items()) and len(seen) > 20
    return found


def merges(model, same):
    found = {}
    same = copy.deepcopy(same)
    with unsharded(model):
        model.merge_adapter()
        same.merge_adapter()
        found["merged inside"] = torch.equal(logits(model), logits(same))
        model.unmerge_adapter()
        same.unmerge_adapter()
    found["unmerged and cut"] = torch.equal(logits(model), logits(same)) and bool(sharded_units(model))
    return found


def writes(world, model, same):
    found = {}
    with unsharded(model), torch.no_grad():
        for one in (model, same):
            one.get_parameter("base_model.model.model.layers.1.input_layernorm.weight").mul_(1.5)
            one.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer").values.data[
                3
            ] = 7
    found["a change is cut again"] = torch.equal(logits(model), logits(same))
    other = copy.deepcopy(model)

    def unlike():
        with unsharded(other), torch.no_grad():
            other.get_parameter("base_model.model.model.layers.1.input_layernorm.weight").mul_(2 + world.rank)

    found["unlike changes"] = message(unlike)

    def replaced():
        with unsharded(other):
            other.merge_and_unload()

    other = copy.deepcopy(model)
    found["replaced"] = message(replaced)
    found["is as it was"] = torch.equal(logits(other), logits(same))
    for_good = unshard(copy.deepcopy(model))
    merged, wanted = for_good.merge_and_unload(), copy.deepcopy(same).merge_and_unload()
    found["merged for good"] = tensors(merged) == tensors(wanted)
    return found


def refusals(model, same, folder):
    base = model.get_base_model()
    layer = base.get_submodule("model.layers.0.self_attn.q_proj.base_layer")
    whole = {name: tensor for name, tensor in same.state_dict().items()}
    dora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    works = {
        "dequantize": layer.dequantize,
        "packed": lambda: layer.packed.dequantize(),
        "weight": lambda: layer.weight + 1,
        "norm": lambda: base.get_submodule("model.layers.1.input_layernorm").weight.float().sum(),
        "merge_adapter": lambda: copy.deepcopy(model).merge_adapter(),
        "merge_and_unload": lambda: copy.deepcopy(model).merge_and_unload(),
        "dora after": lambda: copy.deepcopy(model).add_adapter("second", dora),
        "base.save_pretrained": lambda: base.save_pretrained(folder / "refused"),
        "save_file": lambda: save_file(model.state_dict(), folder / "refused.safetensors"),
        "load_state_dict": lambda: model.load_state_dict(whole),
        "half": lambda: copy.deepcopy(model).half(),
        "embedding": lambda: base.get_input_embeddings().weight[0] + 1,
        "numpy": lambda: layer.values.numpy(),
        "tolist": lambda: layer.values.tolist(),
        "clone": lambda: layer.values.clone(),
        "save_whole of peft": lambda: save_pretrained(model, folder / "refused"),
    }
    return {name: message(work) for name, work in works.items()}


def copies(model, same):
    return {
        "deepcopy": torch.equal(logits(copy.deepcopy(model)), logits(same)),
        "to": torch.equal(logits(model.to("cpu")), logits(same)),
    }


def saving(world, model, same, folder, kind):
    """By rank 0 alone for the adapter, by all ranks for the base: the files of the whole model."""
    if world.first:
        model.save_pretrained(folder / f"{kind}-adapter-cut")
        same.save_pretrained(folder / f"{kind}-adapter-whole")
    world.barrier()
    plain = mg.from_pretrained(folder / kind)
    cut = shard(mg.from_pretrained(folder / kind), world)
    save_pretrained(cut, folder / f"{kind}-base-cut")
    if world.first:
        plain.save_pretrained(folder / f"{kind}-base-whole")
    world.barrier()
    left = [path.name for path in folder.iterdir() if path.name.startswith(".whole")]
    return {
        "adapter": files(folder / f"{kind}-adapter-cut") == files(folder / f"{kind}-adapter-whole"),
        "base": files(folder / f"{kind}-base-cut") == files(folder / f"{kind}-base-whole"),
        "nothing left": left == [],
    }


def everything(world, folder):
    folder, found = pathlib.Path(folder), {}
    for kind in ("nf4", "tied"):
        same = build(folder / kind)
        model = shard(build(folder / kind), world)
        found[kind] = whole_again(world, model, same)
        found[kind] |= copies(model, same) | saving(world, model, same, folder, kind)
        if kind == "tied":
            dense = model.get_base_model()
            found["dense"] = message(lambda: dense.save_pretrained(folder / "refused"))  # noqa: B023
        else:
            found["refused"] = refusals(model, same, folder)
            found["merges"] = merges(model, same)
            found["second adapter"] = second_adapter(model, same)
            found["writes"] = writes(world, model, same)
    dora = build(folder / "nf4", use_dora=True)
    cut = shard(build(folder / "nf4", use_dora=True), world)
    found["dora"] = {"before sharding": torch.equal(logits(cut), logits(dora))}
    return found


def fails_after_writing(world, model, where):
    def work():
        with unsharded(model):
            for parameter in model.get_submodule(where).parameters():
                if not parameter.requires_grad:
                    parameter.data.view(torch.uint8).add_(1)
            if world.rank == 1:
                raise KeyError("of rank 1")

    return message(work)


def fails_while_merged(world, model):
    def work():
        with unsharded(model):
            model.merge_adapter()
            if world.rank == 1:
                raise KeyError("of rank 1")
            model.unmerge_adapter()

    return message(work)


def replaces_on_one(world, model):
    def work():
        with unsharded(model):
            if world.first:
                model.merge_and_unload()

    return message(work)


def writes_on_one(world, model):
    """Into bytes that the other rank holds, past autograd's counters."""

    def work():
        with unsharded(model):
            if world.first:
                model.get_base_model().get_output_embeddings().weight.data.view(-1)[-1] = 7.0

    return message(work)


def leaves_a_loop_on_one(world, model):
    def work():
        for number, (_, unit) in enumerate(whole_units(model)):
            for parameter in unit.parameters():
                if number == 1 and not parameter.requires_grad:
                    parameter.data.view(torch.uint8).add_(1)
            if world.rank == 1 and number == 1:
                raise KeyError("of rank 1")

    return message(work)


def cannot_write(world, model, folder):
    """No folder, and then a disk that is full when the file is flushed."""
    base, found = shard(mg.from_pretrained(model), world), {}
    nowhere = folder / "tied" / "config.json" / "inside" / "x"
    found["no folder"] = message(lambda: save_pretrained(base, nowhere))
    named = tempfile.NamedTemporaryFile
    if world.first:
        tempfile.NamedTemporaryFile = lambda **_: open("/dev/full", "wb", 1 << 26)  # noqa: SIM115
    found["full"] = message(lambda: save_pretrained(base, folder / "full"))
    tempfile.NamedTemporaryFile = named
    return found


def troubles(world, folder):
    """One rank fails: what each rank is told, and whether the model computes as before."""
    folder, found = pathlib.Path(folder), {"process group": message(lambda: shard(None, world.group))}
    found["cannot write"] = cannot_write(world, folder / "nf4", folder)
    for kind in ("nf4", "tied"):
        model = shard(build(folder / kind), world)
        wanted = logits(model)
        works = {
            "wrote": writes_on_one,
            "failed": partial(fails_after_writing, where="base_model.model.model.layers.1"),
            "merged": fails_while_merged,
            "loop": leaves_a_loop_on_one,
            "replaced": replaces_on_one,
        }
        for name, work in works.items():
            begun = time.monotonic()
            said = work(world, model)
            same = bool(sharded_units(model)) and torch.equal(logits(model), wanted)
            found[f"{kind} {name}"] = [said, same, time.monotonic() - begun]
    return found


def second_adapter(model, same):
    """LoRA needs nothing of the base to begin."""
    for one in (model, same):
        torch.manual_seed(11)
        one.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        one.set_adapter("second")
    found = {"forward": torch.equal(logits(model), logits(same))}
    for one in (model, same):
        one.delete_adapter("second")
        one.set_adapter("default")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unshard")
    source = save_llama(folder / "dense")
    mg.from_pretrained(source, mg.MonographConfig("nf4", double_quant=True)).save_pretrained(folder / "nf4")
    save_llama(folder / "tied", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(2, "distributed/test_unshard:everything", str(folder))


@pytest.mark.parametrize("part", ["nf4", "tied", "merges", "second adapter", "dora"])
def test_what_a_sharded_model_can_do(found, part):
    for rank, results in enumerate(found):
        assert all(results[part].values()), (rank, results[part])


def test_changes_inside_are_cut_again_or_refused(found):
    for results in found:
        writes = results["writes"]
        assert writes["a change is cut again"]
        assert writes["is as it was"]
        assert writes["merged for good"]
        assert "input_layernorm.weight was written on ranks 0, 1 of 2" in writes["unlike changes"]
        assert "q_proj.base_layer.values is gone: the module was replaced" in writes["replaced"]
        assert "wanted monograph.unshard(model)" in writes["replaced"]


@pytest.fixture(scope="module")
def troubled(folder):
    return run_ranks(2, "distributed/test_unshard:troubles", str(folder))


@pytest.mark.parametrize("kind", ["nf4", "tied"])
def test_a_rank_that_fails_or_writes_alone_is_named_and_no_rank_keeps_a_change(troubled, kind):
    own = "KeyError: 'of rank 1'"
    head = "lm_head" if kind == "nf4" else "embed_tokens"
    gone = "base_layer.weight is gone" if kind == "tied" else "base_layer.values is gone"
    wanted = {
        "wrote": [f"{head}.weight was written on rank 0 of 2"] * 2,
        "failed": [f"RuntimeError: unsharded: rank 1: {own}", own],
        "merged": [f"RuntimeError: unsharded: rank 1: {own}", own],
        "loop": ["whole_units: rank 1 left the loop, others did not", own],
        "replaced": [gone, "RuntimeError: unsharded: rank 0: RuntimeError: unsharded: base_model.model."],
    }
    for name, texts in wanted.items():
        for rank, text in enumerate(texts):
            said, same, seconds = troubled[rank][f"{kind} {name}"]
            assert text in said, (rank, name, said)
            assert same, (rank, name)
            assert seconds < 60, (rank, name, seconds)  # a rank that waits ends after 120


def test_a_folder_that_rank_0_cannot_write_is_an_error_on_all_ranks(troubled):
    for results in troubled:
        for case, why in (("no folder", "NotADirectoryError"), ("full", "No space left on device")):
            said = results["cannot write"][case]
            assert "rank 0 could not write" in said
            assert why in said


def test_what_is_no_mesh_or_no_language_model_is_refused_by_name(troubled):
    with pytest.raises(ValueError, match=r"mesh is None, wanted a World, .* or a DeviceMesh"):
        shard(torch.nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match=r"model is a Linear without get_input_embeddings, wanted a transfo"):
        units_of(torch.nn.Linear(2, 2))
    for results in troubled:
        assert "ValueError: shard: mesh is <torch.distributed" in results["process group"]


def test_what_reads_whole_tensors_is_refused_by_name(found):
    for rank, results in enumerate(found):
        refused = dict(results["refused"])
        if rank == 0:  # transformers writes nothing on the others
            refused["save_pretrained of a dense base"] = results["dense"]
        assert "q_proj.base_layer.values is sharded over 2 ranks and was given" in refused["load_state_dict"]
        assert "wanted model.get_base_model()" in refused.pop("save_whole of peft")
        for name, text in refused.items():
            assert "is sharded over 2 ranks" in text, (name, text)
            assert "monograph.unsharded(model)" in text, (name, text)


def test_nothing_is_written_where_saving_is_refused(found, folder):
    assert not [path.name for path in (folder / "refused").glob("*.safetensors")]
    assert not (folder / "refused.safetensors").exists()


def test_a_whole_model_stays_as_it_is(tmp_path):
    model = build(save_llama(tmp_path / "dense"))
    before = tensors(model)
    with unsharded(model) as same:
        assert same is model
        assert list(whole_units(model)) == []
    assert unshard(model) is model
    assert tensors(model) == before
    assert any(isinstance(layer, QuantLinear) for layer in model.modules()) is False
