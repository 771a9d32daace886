"""What merging costs an adapter, measured: the table of docs/cli.md.

Trains a small byte-level Llama on Python's standard library, quantises it to NF4 with `monograph quantize`,
trains a LoRA on that 4-bit model (bitsandbytes, PEFT) with the C++ sources of this tree, and merges it with
five weights into three types. Takes some minutes on a CPU; --reuse merges what an earlier run trained.

    python tools/merge_quality.py --program build/release/cli/monograph --folder /tmp/merge-quality
"""

import argparse
import json
import pathlib
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
LENGTH = 192
Tool = Callable[..., str]


def read_bytes(files: Iterable[pathlib.Path], limit: int) -> torch.Tensor:
    data = b"".join(path.read_bytes() for path in sorted(files))[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(model: Any, data: torch.Tensor, steps: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(data) - LENGTH, (8,), generator=generator).tolist()
        batch = torch.stack([data[s : s + LENGTH] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step}: {loss.item():.3f}", flush=True)


@torch.inference_mode()
def loss_of(model: Any, data: torch.Tensor) -> float:
    model.eval()
    rows = data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)[:48]
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(8)]
    return sum(losses) / len(losses)


def make_models(folder: pathlib.Path, steps: int, tool: Tool) -> None:
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    python = read_bytes(library.glob("*.py"), 4_000_000)
    sources = sorted((ROOT / "core").rglob("*.cpp"))
    cpp, held_out = read_bytes(sources[::2], 2_000_000), read_bytes(sources[1::2], 2_000_000)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    base: Any = LlamaForCausalLM(config)
    print("base, Python sources")
    train(base, python, steps, 2e-3)
    base.to(torch.bfloat16).save_pretrained(folder / "base")
    tool("quantize", folder / "base", folder / "nf4", "--double-quant", "--force")
    quantised = AutoModelForCausalLM.from_pretrained(folder / "nf4", device_map="cpu", dtype=torch.float32)
    print(f"  loss of the 4-bit base on held-out C++: {loss_of(quantised, held_out):.4f}")
    adapter = get_peft_model(quantised, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    print("adapter, C++ sources")
    train(adapter, cpp, steps // 2, 1e-3)
    adapter.save_pretrained(str(folder / "adapter"))
    print(f"  loss with the adapter: {loss_of(adapter, held_out):.4f}")


def print_table(folder: pathlib.Path, tool: Tool) -> None:
    print("\n| size of the change | fp32: cosine, kept | bf16: cosine, kept | nf4: cosine, kept |")
    print("|---|---|---|---|")
    for weight in (1, 0.3, 0.1, 0.03, 0.01):
        cells = []
        for to in ("fp32", "bf16", "nf4"):
            text = tool(
                "merge", folder / "nf4", "--adapter", f"{folder}/adapter:{weight}", "--base", "dequantized",
                "--to", to, "--double-quant", "--out", folder / "merged", "--force", "--json",
            )  # fmt: skip
            whole = json.loads(text)["whole"]
            cells.append(f"{whole['cosine']:.4f}, {whole['kept']:.0%}")
        size = whole["intended_norm"] / whole["base_norm"]
        print(f"| {size:.1%} of the base | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="monograph")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=160, help="of the base; half as many for the adapter")
    parser.add_argument("--reuse", action="store_true", help="merge what an earlier run trained")
    options = parser.parse_args()

    def tool(*arguments: object) -> str:
        command = [options.program, *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if not options.reuse:
        make_models(options.folder, options.steps, tool)
    print_table(options.folder, tool)


if __name__ == "__main__":
    main()
