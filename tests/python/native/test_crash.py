"""Faults under the whole program: calls that fail, a full disk, kill -9. Whatever happens, the target is the
old state or the complete new one, the sources are untouched, and a rerun leaves nothing beside them.

MONOGRAPH_KILLS sets how many times each command is killed (default 12).
"""

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from transformers import LlamaForCausalLM

from support.failing_calls import digest, failing
from support.merge_reference import adapter_on
from support.native_tool import program
from support.tiny_models import llama_config

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("MONOGRAPH_KILLS", "12"))


class Command:
    """One command, its sources, the old state of its target and the new one."""

    def __init__(self, folder, name):
        self.folder, self.out = folder, folder / "out"
        sources = folder / "sources"
        if name == "quantize":
            arguments = ["quantize", sources / "base", self.out, "--double-quant"]
        else:
            adapter = sources / "adapter"
            arguments = ["merge", sources / "base", "--adapter", adapter, "--base", "original"]
            arguments += ["--out", self.out, "--max-shard-size", "1MB", "--warn-below", "0"]
        self.arguments = [str(program()), *map(str, arguments), "--force", "--quiet"]
        self.sources = digest(sources)
        assert self.run().returncode == 0
        self.new = digest(self.out)
        self.old = {"config.json": hashlib.sha256(b"{}").hexdigest()}
        self.reset(with_old=False)

    def reset(self, with_old):
        shutil.rmtree(self.out, ignore_errors=True)
        if with_old:
            self.out.mkdir()
            (self.out / "config.json").write_text("{}")

    def run(self, **options):
        return subprocess.run(self.arguments, capture_output=True, text=True, timeout=120, **options)

    def check(self, with_old, done=False):
        state = digest(self.out)
        allowed = [self.new] if done else [self.new, self.old if with_old else None]
        assert state in allowed, state
        return state == self.new

    def check_rerun(self):
        again = self.run()
        assert again.returncode == 0, again.stderr
        assert digest(self.out) == self.new
        assert {path.name for path in self.folder.iterdir()} == {"sources", "out"}
        assert digest(self.folder / "sources") == self.sources


@pytest.fixture(scope="module", params=["quantize", "merge"])
def command(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=8000)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "sources" / "base")
    (folder / "sources" / "base" / "tokenizer.json").write_text("{}")
    adapter_on(model, folder / "sources" / "adapter", torch.float32, target_modules="all-linear")
    return Command(folder, request.param)


@pytest.mark.parametrize(
    "call", ["pwrite", "fsync", "fallocate", "rename", "renameat2", "mkdir", "open", "malloc"]
)
def test_each_call_fails_in_turn(command, tmp_path, call):
    command.reset(with_old=True)
    assert command.run(env=failing(call, count=tmp_path / "count")).returncode == 0
    calls = int((tmp_path / "count").read_text())
    assert calls > 0
    # Every call if they are few; else the first ones and a spread over the rest.
    stops = sorted({*range(min(calls, 12)), *(calls * i // 12 for i in range(12)), calls - 1})
    failures = 0
    for at in stops:
        with_old = at % 2 == 0
        command.reset(with_old)
        if call == "renameat2" and not with_old:
            continue
        code = errno.ENOSPC if call in ("pwrite", "fallocate") else errno.EIO
        done = command.run(env=failing(call, at, code))
        # Without memory before main, or inside the standard library, only the end of the process is left.
        allowed = (0, 5, -signal.SIGABRT) if call == "malloc" else (0, 5)
        assert done.returncode in allowed, (call, at, done.returncode, done.stderr)
        command.check(with_old, done=done.returncode == 0)
        failures += done.returncode != 0
        if at % 4 == 0:
            command.check_rerun()
    assert failures > 0
    command.check_rerun()


def test_a_full_disk(command):
    """No file may grow beyond a limit: the system refuses the write, as it does on a full disk."""
    largest = max(path.stat().st_size for path in command.out.iterdir()) if command.out.exists() else 400_000
    for limit in (0, 1000, largest // 2, largest - 1):
        command.reset(with_old=True)

        def shrink(limit=limit):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        done = command.run(preexec_fn=shrink)
        assert done.returncode == 5, done.stderr
        assert not command.check(with_old=True)
    command.check_rerun()


def test_kill_9_at_random_moments(command):
    rng = random.Random(20261115)
    started = time.monotonic()
    command.reset(with_old=True)
    assert command.run().returncode == 0
    seconds = time.monotonic() - started
    killed = complete = 0
    for number in range(KILLS):
        with_old = number % 2 == 0
        command.reset(with_old)
        process = subprocess.Popen(command.arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=rng.uniform(0, 1.05 * seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        complete += command.check(with_old)
        if number % 10 == 9:
            command.check_rerun()
    command.check_rerun()
    print(f"{KILLS} runs, {killed} killed, {complete} complete, {seconds:.2f} s a run")
    assert killed >= KILLS // 3


def test_an_interrupt_cleans_up(command):
    command.reset(with_old=True)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(command.arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.02)
        process.send_signal(signal_number)
        code = process.wait()
        assert code in (0, 128 + signal_number, -signal_number)
        command.check(with_old=True)
    command.check_rerun()
