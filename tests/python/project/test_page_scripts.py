"""Every block of Python, YAML, JSON, C++ or CMake that a page shows is run, or read by what reads it.

A page leaves some names to its reader: a model, a trainer, batches. HAS says which, for each page that has
Python; all else is as printed. A new block fails until it stands there.
"""

import json
import re

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig

import monograph as mg
from monograph.packing import PackedCollator
from monograph.recipe import check_keys
from support.gguf_bases import mixed_base
from support.hub_models import FIRST, make_tiny
from support.native_tool import ROOT
from support.page_blocks import blocks
from support.recipe_files import small_recipe
from support.trl_runs import TEXTS, make_folder, tokenizer

pytestmark = pytest.mark.slow
ELSEWHERE = {"README.md", "docs/start/coming_from.md"}  # test_coming_from.py runs them, and counts
FOLDERS = {
    "gpt-oss-20b": "gpt_oss",
    "Qwen3-30B-A3B": "qwen3_moe",
    "my-moe": "qwen3_moe",
    "Qwen3.5-4B": "qwen3_5",
}
DOCUMENTS = [{"input_ids": torch.arange(2, 2 + length)} for length in (7, 5, 9, 12)]


def shown(language):
    return [block for block in blocks() if block.language == language and block.page not in ELSEWHERE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would run the scripts: small models of the same classes, by the names of the pages."""
    root = tmp_path_factory.mktemp("scripts")
    make_folder(root)
    tokenizer().save_pretrained(root / "dense")
    for name, made in {
        "Llama-3.1-8B": "dense",
        "model": "dense",
        "my-llama": "dense",
        "Llama-3.1-8B-nf4": "nf4",
        "my-llama-nf4": "nf4",
    }.items():
        (root / name).symlink_to(root / made)
    (root / "my-qwen3-next").symlink_to(root / "Qwen3.5-4B")
    for name, recipe in FOLDERS.items():
        make_tiny(FIRST[recipe], root / name)
    (root / "gguf").mkdir()
    mixed_base("Qwen3", root / "gguf")[0].rename(root / "my-llama-Q8_0.gguf")
    mixed_base("Qwen3Moe", root / "gguf-moe")[0].rename(root / "my-qwen3-30b-a3b-Q4_K_M.gguf")
    (root / "scratch").mkdir()
    return root


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def lora_model():
    return mg.add_lora(mg.from_pretrained("nf4"), LoraConfig(r=4, target_modules="all-linear"))


def batch():
    return PackedCollator(max_documents=4)([DOCUMENTS[0], DOCUMENTS[1]])


def model(tmp_path):
    return {"mg": mg, "model": lora_model(), "batch": batch(), "batches": [batch(), batch()]}


def micro_batches(tmp_path):
    return {"batches": [[batch()], [batch()]]}


def ranks(tmp_path):
    from monograph.training import TrainStep

    return model(tmp_path) | micro_batches(tmp_path) | {"TrainStep": TrainStep, "held_back": [batch()]}


def arguments(tmp_path):
    import trl

    return trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, max_length=16, report_to=[], use_cpu=True, save_strategy="no"
    )


def script(tmp_path):
    dataset = Dataset.from_dict({"text": TEXTS})
    return {"folder": "dense", "args": arguments(tmp_path), "dataset": dataset}


def trainer(tmp_path):
    import trl

    dataset = Dataset.from_dict({"text": TEXTS})
    args = arguments(tmp_path)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made = trl.SFTTrainer(
        mg.from_pretrained("nf4"), args, train_dataset=dataset, peft_config=lora, processing_class=tokenizer()
    )
    return {"mg": mg, "trainer": made}


def attention(tmp_path):
    q, k = torch.randn(12, 4, 16), torch.randn(12, 2, 16)
    return {"q": q, "k": k, "v": torch.randn_like(k), "cu_q": torch.tensor([0, 5, 12], dtype=torch.int32)}


def sharded(tmp_path):
    from monograph.distributed import join

    loaded = lora_model()
    mg.shard(loaded, join())
    return {"mg": mg, "model": loaded}


def calibrated(tmp_path):
    names = model(tmp_path)
    names["model"].save_pretrained("outputs/out")
    return names


def kept(tmp_path):
    layer = torch.nn.Linear(8, 8)
    layer.register_buffer("table", torch.randn(64, 64))
    return {"mg": mg, "layer": layer}


def libraries(tmp_path):
    return {"mg": mg, "LoraConfig": LoraConfig}


def experts_on_owners(tmp_path):
    from monograph.distributed import join
    from monograph.training import TrainStep

    return libraries(tmp_path) | {"TrainStep": TrainStep, "folder": "my-moe", "world": join()}


def stepped(tmp_path):
    """After the block above."""
    from monograph.training import TrainStep

    names = experts_on_owners(tmp_path)
    model = lora_model()
    return names | {"model": model, "step": TrainStep(model, mode="eager")}


def nothing(tmp_path):
    return {}


# What a reader has before each block of Python of a page.
HAS = {
    "docs/explain/attention.md": [attention, lambda _: {"folder": "dense"}],
    "docs/explain/distributed.md": [lambda _: {"folder": "nf4"}, sharded],
    "docs/explain/expert_parallel.md": [experts_on_owners, stepped],
    "docs/explain/experts.md": [nothing],
    "docs/explain/merge.md": [calibrated],
    "docs/explain/offload.md": [lambda _: {"mg": mg, "weights": torch.randn(256 * 32, 64)}, model, kept],
    "docs/explain/packing.md": [
        lambda path: (
            model(path) | {"dataset": [{"input_ids": d["input_ids"].tolist()} for d in DOCUMENTS] * 64}
        ),
        lambda path: model(path) | {"world_size": 1},
    ],
    "docs/explain/recurrent.md": [lambda _: {"documents": DOCUMENTS[:2]}],
    "docs/how_to/broken_graph.md": [trainer],
    "docs/how_to/experts.md": [nothing],
    "docs/how_to/gptq_awq.md": [nothing],
    "docs/how_to/gguf.md": [nothing],
    "docs/how_to/many_adapters.md": [
        lambda _: {"first": [batch()], "second": [batch(), batch()]},
        lambda _: {"mg": mg, "base": mg.from_pretrained("my-llama-nf4"), "batches": [batch(), batch()]},
    ],
    "docs/how_to/preferences.md": [nothing],
    "docs/reference/formats.md": [nothing, nothing],
    "docs/reference/training.md": [micro_batches, ranks, nothing],
    "docs/start/problems.md": [libraries, libraries, trainer],
    "docs/start/tutorial.md": [script],
}


def test_every_page_with_python_says_what_its_reader_has():
    found = {}
    for block in shown("python"):
        found[block.page] = found.get(block.page, 0) + 1
    assert found == {page: len(have) for page, have in HAS.items()}


@pytest.mark.parametrize("block", shown("python"), ids=str)
def test_a_script_runs(block, here, tmp_path):
    names = HAS[block.page][block.number](tmp_path)
    exec(compile(block.text, str(block), "exec"), names)


def test_the_reward_of_the_page_counts(here):
    (block,) = [block for block in shown("python") if block.page.endswith("preferences.md")]
    names = {}
    exec(block.text, names)
    assert names["short"](completions=["ab", "abcd"], prompt=["", ""]) == [-2.0, -4.0]


@pytest.mark.parametrize("block", shown("yaml"), ids=str)
def test_a_recipe_is_read_without_an_error(block, here):
    """The keys of the page among those of a recipe that has none of them."""
    keys = small_recipe(here, "alpaca") | yaml.safe_load(block.text)
    assert check_keys(keys).recipe


@pytest.mark.parametrize("block", shown("json"), ids=str)
def test_json_is_json(block):
    """Rows, one a line; or a part of an object."""
    if block.text.startswith("{"):
        assert [json.loads(line) for line in block.text.splitlines()]
    else:
        assert json.loads(f"{{{block.text}}}")


def test_cmake_is_what_the_installed_project_says():
    """`.ci/run installed` builds tests/installed in both ways; C++: test_cpp_page.py."""
    built = (ROOT / "tests" / "installed" / "CMakeLists.txt").read_text()
    found = [
        line for block in shown("cmake") for line in re.sub(r" *#.*", "", block.text).split("\n") if line
    ]
    assert len(found) == 4
    for line in found:
        name, first = re.fullmatch(r"(\w+)\((\w+).*\)", line).groups()
        if name == "target_link_libraries":
            assert re.search(rf"{name}\(\w+ PRIVATE {line.split()[-1][:-1]}\)", built), line
        else:
            assert re.search(rf"{name}\(\S*(?i:{first})", built), line
