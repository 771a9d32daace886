"""What merging costs an adapter, measured: the table of docs/cli.md.

Trains a small byte-level Llama on Python's standard library, quantises it to NF4 with `monograph quantize`,
trains a LoRA on that 4-bit model (bitsandbytes, PEFT) with the C++ sources of this tree, and merges it in
four ways. The loss is that of held-out C++ sources. Takes some minutes on a CPU.

    python tools/merge_quality.py --program build/release/cli/monograph --folder /tmp/merge-quality
"""

import argparse
import json
import pathlib
import subprocess
import sysconfig

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
LENGTH = 192


def read_bytes(files, limit: int) -> torch.Tensor:
    data = b"".join(path.read_bytes() for path in sorted(files))[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(model, data: torch.Tensor, steps: int, rate: float) -> None:
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
def loss_of(model, data: torch.Tensor) -> float:
    model.eval()
    rows = data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)[:48]
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(8)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="monograph")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    folder = options.folder
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    python = read_bytes(library.glob("*.py"), 4_000_000)
    sources = sorted((ROOT / "core").rglob("*.cpp"))
    cpp = read_bytes(sources[::2], 2_000_000)
    held_out = read_bytes(sources[1::2], 2_000_000)

    def tool(*arguments):
        command = [options.program, *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

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
    base = LlamaForCausalLM(config)
    print("base, Python sources")
    train(base, python, options.steps, 2e-3)
    base.to(torch.bfloat16).save_pretrained(folder / "base")
    tool("quantize", folder / "base", folder / "nf4", "--double-quant", "--force")

    quantised = AutoModelForCausalLM.from_pretrained(folder / "nf4", device_map="cpu", dtype=torch.float32)
    losses = {"the 4-bit base alone": loss_of(quantised, held_out)}
    settings = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    adapter = get_peft_model(quantised, settings)
    print("adapter, C++ sources")
    train(adapter, cpp, options.steps // 2, 1e-3)
    adapter.save_pretrained(folder / "adapter")
    losses["with the adapter, not merged"] = loss_of(adapter, held_out)

    rows = {
        "bf16, onto the dequantised base": ("nf4", "dequantized", "bf16"),
        "fp32, onto the dequantised base": ("nf4", "dequantized", "fp32"),
        "bf16, onto the original base": ("base", "original", "bf16"),
        "nf4, onto the dequantised base": ("nf4", "dequantized", "nf4"),
    }
    print("\n| model | loss | share of the gain | cosine | kept |\n|---|---|---|---|---|")
    first, best = losses.values()
    for name, loss in losses.items():
        print(f"| {name} | {loss:.4f} | {(first - loss) / (first - best):.0%} | | |")
    for name, (source, weights, to) in rows.items():
        out = folder / f"merged-{source}-{to}"
        text = tool(
            "merge", folder / source, "--adapter", folder / "adapter", "--base", weights, "--to", to,
            "--double-quant", "--out", out, "--force", "--json",
        )  # fmt: skip
        whole = json.loads(text)["whole"]
        loss = loss_of(
            AutoModelForCausalLM.from_pretrained(out, device_map="cpu", dtype=torch.float32), held_out
        )
        gain = (first - loss) / (first - best)
        print(
            f"| merged to {name} | {loss:.4f} | {gain:.0%} | {whole['cosine']:.4f} | {whole['kept']:.0%} |",
            flush=True,
        )
    assert isinstance(adapter, PeftModel)


if __name__ == "__main__":
    main()
