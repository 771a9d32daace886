"""Rows of shard_table.py: what saves, loads, copies or changes a model. Each gives a cell, or raises."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import monograph as mg
from monograph.distributed.save_full import save_pretrained
from support.sharded_cases import same_bits
from support.wrapped_case import OTHER, SAME, Case, base_model, logits, with_adapter


def dcp_state(case: Case) -> str:
    folder = case.path("dcp", of_rank=False)
    save(case.model().state_dict(), checkpoint_id=folder)
    model = case.model(other=True)
    load(model.state_dict(), checkpoint_id=folder)
    return case.as_whole(model)


def dcp_async(case: Case) -> str:
    folder = case.path("dcp-async", of_rank=False)
    async_save(case.model().state_dict(), checkpoint_id=folder).result()  # type: ignore[union-attr]
    case.world.barrier()
    model = case.model(other=True)
    load(model.state_dict(), checkpoint_id=folder)
    return case.as_whole(model)


def dcp_of_model(case: Case) -> str:
    folder = case.path("dcp-model", of_rank=False)
    save(get_model_state_dict(case.model()), checkpoint_id=folder)
    model = case.model(other=True)
    state = get_model_state_dict(model)
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return case.as_whole(model)


def full_state(case: Case) -> str:
    stored = io.BytesIO()
    torch.save(get_model_state_dict(case.model(), options=StateDictOptions(full_state_dict=True)), stored)
    stored.seek(0)
    model = case.model(other=True)
    model.load_state_dict(torch.load(stored))
    return case.as_whole(model)


def state(case: Case) -> str:
    model = case.model(other=True)
    model.load_state_dict(copy.deepcopy(case.model().state_dict()))
    return case.as_whole(model)


def state_of_whole(case: Case) -> str:
    model = case.model(other=True)
    model.load_state_dict(case.whole().state_dict())
    return case.as_whole(model)


def torch_save(case: Case) -> str:
    torch.save(case.model().state_dict(), case.path("state.pt"))
    model = case.model(other=True)
    model.load_state_dict(torch.load(case.path("state.pt")))
    return case.as_whole(model)


def torch_save_model(case: Case) -> str:
    torch.save(case.model(), case.path("model.pt"))
    return case.as_whole(torch.load(case.path("model.pt"), weights_only=False))


def pickled(case: Case) -> str:
    return case.as_whole(pickle.loads(pickle.dumps(case.model())))


def copied(case: Case) -> str:
    return case.as_whole(copy.deepcopy(case.model()))


def safetensors_file(case: Case) -> str:
    path, model = case.path("state.safetensors"), case.model(other=True)
    save_file({name: tensor.contiguous() for name, tensor in case.model().state_dict().items()}, path)
    model.load_state_dict(load_file(path))
    return case.as_whole(model)


def safetensors_model(case: Case) -> str:
    path, model = str(case.path("model.safetensors")), case.model(other=True)
    save_model(case.model(), path)
    load_model(model, path)
    return case.as_whole(model)


def averaged(case: Case) -> str:
    model = case.model()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return case.as_whole(average.module)


def moved(case: Case) -> str:
    return case.as_whole(case.model().to("cpu"))


def moved_away(case: Case) -> str:
    case.model().to("meta")
    return "moved"


def cast(case: Case) -> str:
    model, whole = case.model().to(torch.bfloat16), case.whole().to(torch.bfloat16)
    return SAME if same_bits(logits(model), logits(whole)) else OTHER


def adapter_folder(case: Case) -> pathlib.Path:
    """A trained adapter of a whole model, whose file the model's own must equal."""
    folder = case.path("adapter")
    case.whole().save_pretrained(folder)
    return folder


def peft_save(case: Case) -> str:
    folder = case.path("own-adapter")
    case.model().save_pretrained(folder)
    name = "adapter_model.safetensors"
    return SAME if (folder / name).read_bytes() == (adapter_folder(case) / name).read_bytes() else OTHER


def peft_load(case: Case, low_memory: bool = False) -> str:
    folder, found = adapter_folder(case), []
    for model in (case.model(), case.whole()):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.zero_()
        model.load_adapter(folder, "default", is_trainable=True, low_cpu_mem_usage=low_memory)
        model.load_adapter(folder, "second", low_cpu_mem_usage=low_memory)
        model.set_adapter("second")
        found.append(logits(model))
    return SAME if same_bits(*found) and same_bits(found[0], logits(case.whole())) else OTHER


def peft_load_low_memory(case: Case) -> str:
    return peft_load(case, low_memory=True)


def peft_delete(case: Case) -> str:
    found = []
    for model in (case.model(), case.whole()):
        torch.manual_seed(5)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.set_adapter("second")
        model.delete_adapter("default")
        found.append(logits(model))
    return SAME if same_bits(*found) else OTHER


def peft_disable(case: Case) -> str:
    model, whole = case.model(), case.whole()
    with model.disable_adapter(), whole.disable_adapter():
        return SAME if same_bits(logits(model), logits(whole)) else OTHER


def peft_after(case: Case) -> str:
    """An adapter on a base that is sharded already."""
    return case.as_whole(with_adapter(case.shard(base_model())))


def peft_from_pretrained(case: Case) -> str:
    return case.as_whole(
        mg.optimize(PeftModel.from_pretrained(case.shard(base_model()), adapter_folder(case)))
    )


def peft_unoptimized(case: Case) -> str:
    """PEFT's own layers, without ours."""
    lora, found = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), []
    for cut in (True, False):
        torch.manual_seed(1)
        model = get_peft_model(base_model(), lora)
        found.append(logits(case.shard(model) if cut else model))
    return SAME if same_bits(*found) else OTHER


def peft_merge(case: Case) -> str:
    model, whole = case.model(), case.whole()
    model.merge_adapter()
    whole.merge_adapter()
    return SAME if same_bits(logits(model), logits(whole)) else OTHER


def peft_merge_inside(case: Case) -> str:
    model, whole = case.model(), case.whole()
    with mg.unsharded(model):
        model.merge_adapter()
        whole.merge_adapter()
        same = same_bits(logits(model), logits(whole))
        model.unmerge_adapter()
    return SAME if same and case.as_whole(model) == SAME else OTHER


def saved_base(case: Case) -> str:
    base = case.shard(base_model())
    base.save_pretrained(case.path("base", of_rank=False))
    return "written" if case.world.first else "nothing to write"


def saved_whole(case: Case) -> str:
    folder = case.path("whole-base", of_rank=False)
    save_pretrained(case.shard(base_model()), folder)
    if case.world.first:
        base_model().save_pretrained(case.path("plain-base"))
    case.world.barrier()
    name = "model.safetensors"
    plain = case.folder / "plain-base-0" / name
    return SAME if (folder / name).read_bytes() == plain.read_bytes() else OTHER


ROWS: dict[str, Callable[[Case], str]] = {
    "`dcp.save`, `dcp.load` of `state_dict()`": dcp_state,
    "`dcp.async_save`": dcp_async,
    "`get_model_state_dict`, `set_model_state_dict`": dcp_of_model,
    "`full_state_dict=True`, `torch.save`, `load_state_dict`": full_state,
    "`load_state_dict(copy.deepcopy(state_dict()))`": state,
    "`load_state_dict` of a whole model": state_of_whole,
    "`torch.save(state_dict())`": torch_save,
    "`torch.save(model)`": torch_save_model,
    "`pickle`": pickled,
    "`copy.deepcopy`": copied,
    "safetensors' `save_file(state_dict())`": safetensors_file,
    "safetensors' `save_model`": safetensors_model,
    "`AveragedModel` (EMA)": averaged,
    '`.to("cpu")`': moved,
    '`.to("meta")`': moved_away,
    "`.to(torch.bfloat16)`": cast,
    "PEFT: `save_pretrained`": peft_save,
    "PEFT: `load_adapter`": peft_load,
    "PEFT: `load_adapter(low_cpu_mem_usage=True)`": peft_load_low_memory,
    "PEFT: `add_adapter`, `delete_adapter`": peft_delete,
    "PEFT: `disable_adapter`": peft_disable,
    "PEFT: layers that `mg.optimize` did not take over": peft_unoptimized,
    "PEFT: an adapter on a base that is sharded already": peft_after,
    "PEFT: `PeftModel.from_pretrained` on such a base": peft_from_pretrained,
    "PEFT: `merge_adapter`": peft_merge,
    "PEFT: `merge_adapter` inside `mg.unsharded`": peft_merge_inside,
    "the base's `save_pretrained`": saved_base,
    "`monograph.distributed.save_full.save_pretrained`": saved_whole,
}
