"""Import paths of earlier versions give today's modules, the same objects; none of them is imported early."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from monograph.old_paths import MOVED, OldPaths

# One object of each moved module, as earlier versions knew it.
OBJECTS = {
    "monograph.transformers_attention": "attention_forward",
    "monograph.transformers_config": "MonographConfig",
    "monograph.transformers_quantizer": "MonographQuantizer",
    "monograph.dense_weights": "DenseWeight",
    "monograph.loading": "from_pretrained",
    "monograph.trl_head": "take_over",
    "monograph.nn.lora_start": "StartedLora",
    "monograph.nn.lora_linear": "LoraLinear",
    "monograph.under_peft": "optimize",
    "monograph.diagnosis.trainer": "doctor_trainer",
    "monograph.nn.packed_state": "PackedState",
}


def test_every_moved_module_has_an_object_to_look_for():
    assert OBJECTS.keys() == MOVED.keys()


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_new_module(old):
    above, _, name = old.rpartition(".")
    package = importlib.import_module(above)
    sys.modules.pop(old, None)
    vars(package).pop(name, None)
    module = importlib.import_module(old)
    assert module is sys.modules[MOVED[old]]
    assert getattr(package, name) is module
    assert module.__name__ == module.__spec__.name == MOVED[old]
    assert importlib.import_module(old) is module


@pytest.mark.parametrize("old", MOVED)
def test_a_pickle_of_an_earlier_version_gives_the_same_object(old):
    name = OBJECTS[old]
    written = f"c{old}\n{name}\n.".encode()  # GLOBAL module name, STOP: what pickle writes for a class
    found = pickle.loads(written)
    assert found is getattr(importlib.import_module(MOVED[old]), name)
    assert found.__module__ == MOVED[old]
    assert pickle.loads(pickle.dumps(found)) is found


def test_old_paths_come_first_in_a_fresh_process():
    lines = [
        f"from {old} import {name} as a\nfrom {MOVED[old]} import {name} as b\nassert a is b"
        for old, name in OBJECTS.items()
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_importing_monograph_imports_no_other_library():
    lines = "import sys, monograph; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "monograph.nn.quant_linear" in loaded
    integrations = {new for new in MOVED.values() if new.startswith("monograph.integrations.")}
    assert len(integrations) >= 10
    assert not loaded & {"accelerate", "peft", "transformers", "trl", *MOVED, *integrations}


def test_the_finder_is_there_once_and_knows_no_other_name():
    (finder,) = [finder for finder in sys.meta_path if isinstance(finder, OldPaths)]
    assert finder.find_spec("monograph.no_such_module", None) is None
    with pytest.raises(ModuleNotFoundError, match=r"monograph\.no_such_module"):
        importlib.import_module("monograph.no_such_module")
