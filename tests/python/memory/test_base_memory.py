"""A base larger than memory: the same bits, and no more in memory than is allowed."""

import ctypes
import gc
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import safe_open, save_file

import monograph as mg
from monograph.bench.large_model import write_model
from monograph.memory.base_memory import base_memory_of, bytes_of, limit_base_memory
from monograph.memory.base_memory.mapped_base import Reading, mapped_tensors
from monograph.memory.mapped_memory import MappedMemory
from monograph.ops.experts import experts
from monograph.packing import PackedCollator
from monograph.recipe.config.keys import Recipe
from monograph.recipe.run.load_model import load_base
from monograph.training import TrainStep

MIB = 1 << 20
# 8 layers of 7.75 MiB, a head of 5 MiB.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2560,
}
LIMIT = 48 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("base")
    write_model(made, 8, **SIZES)
    return made


def evict(folder):
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path):
    """Bytes of a file in the page cache, as the system counts them."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as area:
        there = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        window = (ctypes.c_char * size).from_buffer(area)
        address = ctypes.c_void_p(ctypes.addressof(window))
        assert libc.mincore(address, ctypes.c_size_t(size), there) == 0
        del window
    return sum(entry & 1 for entry in there) * mmap.PAGESIZE


def held(folder):
    return sum(cached(path) for path in folder.glob("*.safetensors"))


def train(model, steps=2, after=lambda: None):
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    wrapped = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    step = TrainStep(wrapped, mode="eager")
    generator = torch.Generator().manual_seed(1)
    collate = PackedCollator(pad_to_multiple_of=32, max_documents=4)
    numbers = []
    for _ in range(steps):
        ids = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (20, 12)]
        result = step([collate([{"input_ids": row} for row in ids])], 1e-3)
        numbers.append((result.loss.item(), result.grad_norm.item()))
        after()
    return numbers, wrapped


def test_training_has_the_same_bits_and_holds_no_more(folder):
    evict(folder)
    model = mg.from_pretrained(folder, base_memory=LIMIT)
    memory = base_memory_of(model)
    assert memory.units == 9
    most = []
    limited, wrapped = train(model, 3, lambda: most.append(held(folder)))
    assert base_memory_of(wrapped) is memory
    numbers = memory.numbers
    # Rows of the table of tokens, headers and pages at borders besides.
    assert max(most) <= LIMIT + 2 * MIB, most
    # Rows of the table are counted once a pass: those of 32 tokens come on top, each on two pages at most.
    assert numbers.most_held <= LIMIT + 32 * 2 * mmap.PAGESIZE
    assert memory.nbytes > 65 * MIB
    left_out = memory.nbytes - LIMIT
    # The first pass, three steps there and back, and what is read for a fourth.
    assert LIMIT + 6 * left_out - 2 * MIB <= numbers.read <= LIMIT + 7 * left_out + 20 * MIB
    uses = [event.unit for event in memory.events() if event.kind == "use"]
    assert uses[:18] == [*range(9), *range(7, -1, -1), 1]
    del model, wrapped
    gc.collect()
    plain, _ = train(mg.from_pretrained(folder), 3)
    assert limited == plain


def test_a_base_that_left_its_files_is_refused_by_the_next_step(folder):
    """share_memory() copies every tensor and ends its mapping: what was read ahead are no addresses of the
    base any more."""
    model = mg.from_pretrained(folder, base_memory=LIMIT)
    model.share_memory()
    with pytest.raises(
        RuntimeError, match=r"base_memory: \d+ of \d+ tensors of the base were moved from the"
    ):
        train(model, 1)


def test_forward_only_and_generation(folder):
    ids = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        plain = mg.from_pretrained(folder).eval()
        want, tokens = plain(ids).logits, plain.generate(ids, max_new_tokens=4, do_sample=False)
        del plain
        gc.collect()
        evict(folder)
        model = mg.from_pretrained(folder, base_memory=LIMIT).eval()
        for _ in range(3):
            assert torch.equal(model(ids).logits, want)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    assert held(folder) <= LIMIT + 8 * MIB  # the head of generate() is torch's, and tells nothing
    memory = base_memory_of(model)
    memory.close()
    memory.close()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)


def disturbed(model):
    """Two micro-batches a step; between steps an evaluation, a generation, a forward pass that fails and a
    loader with a worker."""
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    wrapped = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    step = TrainStep(wrapped, mode="eager")
    collate = PackedCollator(pad_to_multiple_of=32, max_documents=4)
    rows = torch.randint(0, SIZES["vocab_size"], (4, 24), generator=torch.Generator().manual_seed(1))

    def fail(*_):
        raise ArithmeticError("in the middle")

    numbers = []
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            [{"input_ids": row.tolist()} for row in rows],
            batch_size=2,
            collate_fn=collate,
            num_workers=1,
            multiprocessing_context="fork",
        )
        result = step(list(loader), 1e-3)
        with torch.no_grad():
            logits = wrapped(rows).logits
            tokens = wrapped.generate(input_ids=rows[:1], max_new_tokens=2, do_sample=False)
            hook = model.model.layers[5].register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                wrapped(rows)
            hook.remove()
        numbers += [
            result.loss.item(),
            result.grad_norm.item(),
            logits.double().sum().item(),
            tokens.tolist(),
        ]
    return numbers


@pytest.mark.long
def test_whatever_comes_between_steps(folder):
    plain = disturbed(mg.from_pretrained(folder))
    gc.collect()
    evict(folder)
    model = mg.from_pretrained(folder, base_memory=LIMIT)
    assert disturbed(model) == plain
    assert base_memory_of(model).numbers.most_held <= LIMIT + 8 * MIB  # the head of generate() tells nothing


def test_ends_with_the_model(folder):
    before = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    model = mg.from_pretrained(folder, base_memory=LIMIT)
    with torch.no_grad():
        model(torch.arange(4).view(1, 4))
    assert len(os.listdir("/proc/self/task")) > before
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= before + (threading.active_count() > 1)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_two_models_and_a_child(folder):
    ids = torch.arange(8).view(1, 8)
    first = mg.from_pretrained(folder, base_memory=LIMIT)
    second = mg.from_pretrained(folder, base_memory=LIMIT + MIB)
    with torch.no_grad():
        want = first(ids).logits
        assert torch.equal(second(ids).logits, want)
    assert base_memory_of(first).numbers.allowed == LIMIT
    assert base_memory_of(second).numbers.allowed == LIMIT + MIB
    with pytest.raises(ValueError, match="has a limit already"):
        limit_base_memory(first, LIMIT)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            os._exit(0 if torch.equal(first(ids).logits, want) else 1)
    assert os.waitpid(child, 0)[1] == 0


CUT = """
    import sys, torch, monograph as mg
    model = mg.from_pretrained(sys.argv[1], base_memory="48MiB")
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        model(ids)
        with open(f"{sys.argv[1]}/model-00004-of-00011.safetensors", "r+b") as file:
            file.truncate(5_000_000) if sys.argv[2] == "cut" else file.write(b"x")
        for _ in range(2):
            try:
                model(ids)
            except RuntimeError as error:
                print("NAMED", error)
"""


@pytest.mark.parametrize(
    ("how", "words"), [("cut", ("has 5000000 bytes, wanted", "it was cut")), ("written", ("was written at",))]
)
def test_a_file_that_changes_is_named(folder, tmp_path, how, words):
    copy = shutil.copytree(folder, tmp_path / "copy")
    program = [sys.executable, "-c", textwrap.dedent(CUT), copy, how]
    done = subprocess.run(program, capture_output=True, text=True)
    named = [line for line in done.stdout.split("\n") if line.startswith("NAMED")]
    assert done.returncode == 0, done.stderr
    assert len(named) == 2
    assert all("model-00004-of-00011.safetensors" in line for line in named)
    assert all(any(word in line for word in words) for line in named), named


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"wanted at least .*: the largest layer, or the head"):
        mg.from_pretrained(folder, base_memory="20MiB")
    with pytest.raises(ValueError, match="base_memory is '3 apples', wanted bytes"):
        mg.from_pretrained(folder, base_memory="3 apples")
    with pytest.raises(ValueError, match=r"embed_tokens.weight .* is not mapped from a file"):
        mg.from_pretrained(folder, base_memory=LIMIT, dtype=torch.float16)
    assert bytes_of("3GiB") == 3 << 30
    assert bytes_of("1.5 GB") == 1_500_000_000
    assert bytes_of(77) == 77
    for wrong in (0, -1, "0GiB", True, "1GiB2", ""):
        with pytest.raises(ValueError, match="base_memory is"):
            bytes_of(wrong)


@pytest.mark.parametrize(
    ("tensors", "files", "allowed", "words"),
    [
        ([], [0], 1, "tensors has 0 numbers"),
        ([4096] * 5, [0], 1, "tensors has 5 numbers"),
        ([4096, 4096, 0, 0, 0, 0], [0], 0, "allowed is 0"),
        ([4096, 4096, 0, 0, 0, 0], [], 1 << 30, "tensor 0 has numbers out of range"),
        ([4096, 4096, 1, 0, 0, 0], [0], 1 << 30, "tensor 0 has numbers out of range"),
        ([4096, 4096, 0, 0, 0, 3], [0], 1 << 30, "tensor 0 has numbers out of range"),
        ([-4096, 4096, 0, 0, 0, 0], [0], 1 << 30, "tensor 0 has numbers out of range"),
        ([4096, -1, 0, 0, 0, 0], [0], 1 << 30, "tensor 0 has numbers out of range"),
        ([4096, 4096, 0, 0, -1, 0], [0], 1 << 30, "tensor 0 has numbers out of range"),
        ([4096, 4096, 0, 0, 0, 0], [-1], 1 << 30, r"files\[0\] is -1"),
        ([4096, 4096, 0, 0, 0, 0], [1 << 32], 1 << 30, r"files\[0\] is 4294967296"),
        ([4096, 4096, 0, 0, 0, 0], [99999], 1 << 30, "file 99999 cannot be looked at"),
    ],
)
def test_numbers_out_of_range(tensors, files, allowed, words):
    with pytest.raises(RuntimeError, match=words):
        torch.ops.monograph.read_ahead_open(tensors, files, allowed)


def test_numbers_that_are_not_open():
    for number in (-1, 0, 1 << 40):
        torch.ops.monograph.read_ahead_close(number)
        with pytest.raises(RuntimeError, match=f"{number} is not open in this process"):
            torch.ops.monograph.read_ahead_numbers(number)
        with pytest.raises(RuntimeError, match=f"{number} is not open in this process"):
            torch.ops.monograph.read_ahead_events(number)


def test_a_base_that_is_gone_or_in_memory(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    model = mg.from_pretrained(copy)
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"embed_tokens.weight .* is not mapped from a file that is there"):
        limit_base_memory(model, LIMIT)
    if os.path.isdir("/dev/shm"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            shutil.copytree(folder, memory, dirs_exist_ok=True)
            with pytest.raises(ValueError, match=r"\.safetensors lies in memory \(tmpfs\)"):
                mg.from_pretrained(memory, base_memory=LIMIT)


def test_deleted_while_it_trains(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        want = mg.from_pretrained(folder)(ids).logits
        model = mg.from_pretrained(copy, base_memory=LIMIT)
        model(ids)
        shutil.rmtree(copy)
        assert torch.equal(model(ids).logits, want)


def test_a_vocabulary_that_grew_is_refused(folder, monkeypatch):
    """Rows that are added make copies of embedding and head in memory."""

    def grow(model, *_):
        model.resize_token_embeddings(SIZES["vocab_size"] + 1, mean_resizing=False)
        vars(model)["rows_before_new_tokens"] = SIZES["vocab_size"]

    recipe = Recipe(base_model=str(folder), adapter="qlora", base_memory=LIMIT)
    assert base_memory_of(load_base(recipe, str(folder))).numbers.allowed == LIMIT
    monkeypatch.setattr("monograph.recipe.run.load_model.grow_vocabulary", grow)
    with pytest.raises(ValueError, match="base_memory and new tokens: embedding and head have grown"):
        load_base(recipe, str(folder))


def test_order_of_units(folder):
    model = mg.from_pretrained(folder)
    with MappedMemory() as memory:
        tensors = mapped_tensors(model, memory)
    assert [t.unit for t in tensors] == sorted(t.unit for t in tensors)
    scattered = [t.name for t in tensors if t.reading is Reading.SCATTERED]
    assert scattered == ["model.embed_tokens.weight"]
    head = next(t for t in tensors if t.name == "lm_head.weight")
    assert head.unit == 8
    layer = [t for t in tensors if t.unit == 3]
    assert all(".layers.3." in t.name for t in layer)
    names = {name for name, _ in model.named_parameters() if ".layers.3." in name}
    large = [tensor for name, tensor in model.named_parameters() if name in names and tensor.nbytes >= MIB]
    assert len(large) == 3  # those of the MLP
    assert sum(t.nbytes for t in large) < sum(t.nbytes for t in layer) < 8 * MIB
    for one, other in zip(sorted(t.address for t in tensors), sorted(t.end for t in tensors), strict=True):
        assert one < other


def test_experts_are_read_when_routed_to(tmp_path):
    """8 experts of 0.8 MiB, two of them routed to."""
    count, size, hidden = 8, 512, 1024
    path = tmp_path / "experts.safetensors"
    generator = torch.Generator().manual_seed(0)
    up = mg.quantize(torch.randn(count, 2 * size, hidden, generator=generator).bfloat16(), "mxfp4")
    down = mg.quantize(torch.randn(count, hidden, size, generator=generator).bfloat16(), "mxfp4")
    parts = {"up": up.values, "up_scale": up.scales[0], "down": down.values, "down_scale": down.scales[0]}
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, path)
    evict(tmp_path)
    with safe_open(path, "pt") as file:
        mapped = {name: file.get_tensor(name) for name in parts}
    flat = []
    with MappedMemory() as memory:
        for tensor in mapped.values():
            for expert in tensor.unbind(0):
                ((file, offset, nbytes),) = memory.extents(expert.data_ptr(), expert.nbytes)
                flat += (expert.data_ptr(), nbytes, 0, 0, offset, int(Reading.ROUTED))
        number = torch.ops.monograph.read_ahead_open(flat, [file], 2 << 30)
    x = torch.randn(4, hidden, generator=generator).bfloat16()
    ids = torch.tensor([[1, 6], [6, 1], [1, 1], [6, -1]])
    weights = torch.full((4, 2), 0.5)

    def run(first, second):
        return experts(x, ids, weights, first, second, save=False)

    layouts = (up.layout, down.layout)
    y = run(
        (mapped["up"], [mapped["up_scale"]], layouts[0]), (mapped["down"], [mapped["down_scale"]], layouts[1])
    )
    whole = sum(tensor.nbytes for tensor in parts.values())
    numbers = torch.ops.monograph.read_ahead_numbers(number)
    assert numbers[3] == whole * 2 // count
    assert whole * 2 // count <= cached(path) <= whole * 2 // count + 32 * mmap.PAGESIZE
    torch.ops.monograph.read_ahead_close(number)
    want = run((up.values, list(up.scales), layouts[0]), (down.values, list(down.scales), layouts[1]))
    assert torch.equal(y, want)
