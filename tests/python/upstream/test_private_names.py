"""Names of other libraries that they do not promise: each is there, and none is spelled anywhere else."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.sym_node import SymNode

import monograph
from monograph.upstream.private_name import PrivateName, loads_on_use
from monograph.upstream.torch_names import RECOMPUTE, STRINGS
from support.tiny_models import tiny_llama

LIBRARIES = ("accelerate", "peft", "torch", "transformers", "trl")
PACKAGE = pathlib.Path(monograph.__file__).parent


def _table(library: str) -> dict[str, PrivateName]:
    return importlib.import_module(f"monograph.upstream.{library}_names").NAMES


ALL = [(library, name) for library in LIBRARIES for name in _table(library)]


def _peft_model(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return get_peft_model(model, LoraConfig(r=1, target_modules=["0"], **options))


def _loaded_model() -> Any:
    """`_weight_conversions` is there after loading alone."""
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(**sizes, num_hidden_layers=1, vocab_size=8).save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder)


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


# How to make an instance of what stands before "()" in a path.
INSTANCES: dict[str, Callable[[], Any]] = {
    "accelerate:Accelerator": _accelerator,
    "peft.tuners.lora.layer:Linear": lambda: _peft_model().base_model.model[0],
    "peft.tuners.lora.layer:ParamWrapper": lambda: _peft_model(
        target_parameters=["1.weight"]
    ).base_model.model[1],
    "peft.utils.other:ModulesToSaveWrapper": lambda: _peft_model(modules_to_save=["1"]).base_model.model[1],
    "torch._dynamo:OptimizedModule": lambda: torch.compile(nn.Linear(1, 1)),
    "torch._ops:OpOverload": lambda: torch.ops.aten.add_.Tensor,
    "torch.nn:Module": nn.Module,
    "transformers:PreTrainedModel": _loaded_model,
}
# The source of a method that sets a name on instances which are slow to make.
SET_IN = {"trl:SFTTrainer": "__init__"}


@pytest.mark.parametrize(("library", "name"), ALL)
def test_the_private_name_is_still_there(library: str, name: str) -> None:
    entry = _table(library)[name]
    if not entry.of_instances:
        entry.load()
        return
    owner, _, attributes = entry.path.partition("().")
    try:
        if owner in SET_IN:
            method = getattr(PrivateName(owner, entry.read_in, entry.purpose).load(), SET_IN[owner])
            assert f"self.{attributes} =" in inspect.getsource(method), entry.gone(f"not in {SET_IN[owner]}")
            return
        found = INSTANCES[owner]()
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except AttributeError as error:
        pytest.fail(entry.gone(str(error)))


@pytest.mark.parametrize(("library", "name"), ALL)
def test_the_entry_says_where_it_was_read_and_for_what(library: str, name: str) -> None:
    entry = _table(library)[name]
    assert entry.library in (library, "functorch")
    assert entry.read_in.count(".") == 2
    assert entry.purpose


@pytest.mark.parametrize("path", ["torch.nn:Module._gone", "torch._gone_module:name"])
def test_a_name_that_is_gone_is_named(path: str) -> None:
    load = loads_on_use("somewhere.here", {"gone": PrivateName(path, "2.13.0", "an example")})
    with pytest.raises(ImportError) as caught:
        load("gone")
    for part in (path, f"torch {torch.__version__}", "read in torch 2.13.0", "needed for: an example"):
        assert part in str(caught.value)


def test_a_former_name_is_taken_where_the_new_one_is_missing() -> None:
    entry = PrivateName("torch.nn:Linear_", "2.13.0", "an example", formerly="torch.nn:Linear")
    assert entry.load() is nn.Linear


def test_names_set_by_others_are_those_we_read() -> None:
    """Strings, not attributes: where the libraries write them."""
    from accelerate import Accelerator
    from torch._logging._internal import log_registry
    from transformers import PreTrainedModel

    from monograph.upstream.accelerate_names import HUNG_ON_MODELS
    from monograph.upstream.torch_names import RECOMPILES_LOG
    from monograph.upstream.transformers_names import INPUT_HOOK

    prepare = inspect.getsource(Accelerator.prepare_model)
    assert all(f"model.{name} =" in prepare for name in HUNG_ON_MODELS)
    assert f"def {INPUT_HOOK}s(" in inspect.getsource(PreTrainedModel.enable_input_require_grads)
    assert "_is_hf_initialized" in inspect.getsource(PreTrainedModel._initialize_missing_keys)
    setter = inspect.getsource(PreTrainedModel._set_gradient_checkpointing)
    assert "_gradient_checkpointing_func" in setter
    assert "recompiles" in log_registry.artifact_names
    assert RECOMPILES_LOG == "torch._dynamo.guards.__recompiles"


# Documented points of extension that are no top-level names.
DOCUMENTED = {
    "accelerate.utils",
    "peft.optimizers",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.tensor",
    "torch.func",
    "torch.optim.lr_scheduler",
    "torch.fx",
    "torch.nn",
    "torch.nn.attention.varlen",
    "torch.nn.functional",
    "torch.nn.utils",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "transformers.quantizers.auto",
    "transformers.quantizers.base",
    "transformers.utils.quantization_config",
}
# Methods of named tuples, and os._exit: documented names.
NO_FOREIGN = {"_asdict", "_exit", "_fields", "_replace"}


def _own_names(tree: ast.AST) -> set[str]:
    """Underscored names that are defined in a file: methods, functions, and what is set on self."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and getattr(node.value, "id", "") == "self":
            found.add(node.attr)
    return found


def _bases_elsewhere(tree: ast.AST) -> set[str]:
    """The modules of ours that a class of a file takes its bases from."""
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("monograph.")
        for alias in node.names
    }
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return {imported[base.id] for base in bases if isinstance(base, ast.Name) and base.id in imported}


@functools.cache
def _of_families() -> dict[pathlib.Path, set[str]]:
    """The names of a class that lies in two files, for both of them."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    found: dict[pathlib.Path, set[str]] = {}
    for path, tree in trees.items():
        for module in _bases_elsewhere(tree):
            base = PACKAGE.parent / pathlib.Path(*module.split(".")).with_suffix(".py")
            if base.parent == path.parent and base in trees:
                names = _own_names(tree) | _own_names(trees[base])
                for one in (path, base):
                    found[one] = found.get(one, set()) | names
    return found


def _foreign_private_names(path: pathlib.Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own, found = _own_names(tree) | _of_families().get(path, set()) | NO_FOREIGN, []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            root = module.partition(".")[0]
            if (root in LIBRARIES and module != root and module not in DOCUMENTED) or root == "functorch":
                found.append(f"{path.name}:{node.lineno} {module}")
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            on_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if private and not on_super and node.attr not in own:
                found.append(f"{path.name}:{node.lineno} .{node.attr}")
    return found


# What a symbolic size has behind it, and a node of a graph has not.
SYMBOLIC = set(dir(SymNode)) - set(dir(torch.fx.Node))


def _attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _undocumented_of_torch(path: pathlib.Path) -> list[str]:
    """What has no underscore: attributes of symbolic sizes, and strings that torch reads or writes."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    for node in _attributes(tree):
        if getattr(node.value, "attr", "") == "node" and node.attr in SYMBOLIC:
            found.append(f"{path.name}:{node.lineno} .node.{node.attr}")
    for text in ast.walk(tree):
        if isinstance(text, ast.Constant) and text.value in STRINGS and not _is_key(text.value):
            found.append(f"{path.name}:{text.lineno} {text.value!r}")
    return found


def _is_key(text: str) -> bool:
    """A word that means something else elsewhere: the mode `recompute` of regions."""
    return text == RECOMPUTE


def test_no_undocumented_name_of_torch_is_spelled_elsewhere() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "upstream" / "torch_names.py":
            found += _undocumented_of_torch(path)
    assert not found, f"move these into monograph/upstream/torch_names.py: {found}"


def test_every_private_name_of_torch_has_a_test_of_what_it_does() -> None:
    tested = set()
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "relies_on":
                inside = (found for argument in node.args for found in ast.walk(argument))
                tested |= {found.value for found in inside if isinstance(found, ast.Constant)}
    assert tested == set(_table("torch")) | set(STRINGS)


def test_no_private_name_of_another_library_is_spelled_elsewhere() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if not (path.parent.name == "upstream" and path.stem.endswith("_names")):
            found += _foreign_private_names(path)
    assert not found, f"move these into monograph/upstream/<library>_names.py: {found}"


def test_the_search_finds_a_private_name(tmp_path: pathlib.Path) -> None:
    source = "import torch._dynamo\nfrom peft.tuners.lora import layer\nmodel._keep_in_fp32_modules\n"
    path = tmp_path / "example.py"
    path.write_text(source)
    assert len(_foreign_private_names(path)) == 3
    path.write_text("size.node.hint\nsaved.node.meta['saved_tensor_with_no_vc_check']\n")
    assert len(_undocumented_of_torch(path)) == 2
