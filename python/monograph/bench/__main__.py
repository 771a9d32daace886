"""Every speed claim of the project.

    python -m monograph.bench dequantize --quick
    python -m monograph.bench quantize --json --isa avx2

Ours and the peers run in the same process in paired rounds; a ratio is peer time over ours, so larger is
better for us. Judge at one thread: two virtual cores may share one matrix unit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

BENCHES = (
    "quantize",
    "quantize_file",
    "export_gguf",
    "dequantize",
    "linear",
    "linear_many",
    "many_step",
    "attention",
    "lora",
    "gram",
    "elementwise",
    "delta_rule",
    "experts",
    "ep_experts",
    "packing",
    "loss",
    "step",
    "finetune",
    "trl",
    "load",
    "first_step",
    "large_model",
    "base_memory",
    "shard_memory",
    "experts_model",
    "format_memory",
    "offload",
    "tree",
)

# Cap the peers to the same instruction set; read by oneDNN, MKL and ATen at their first calls.
PEER_CAPS = {
    "ONEDNN_MAX_CPU_ISA": {
        "scalar": "SSE41",
        "avx2": "AVX2",
        "avx512": "AVX512_CORE",
        "avx512_bf16": "AVX512_CORE_BF16",
    },
    "MKL_ENABLE_INSTRUCTIONS": {"scalar": "SSE4_2", "avx2": "AVX2"},
    "ATEN_CPU_CAPABILITY": {"scalar": "default", "avx2": "avx2"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m monograph.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bench", choices=BENCHES, help="what to measure")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="a smaller set in under 45 seconds")
    parser.add_argument(
        "--threads",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 2],
        help="thread counts, e.g. 1,2 (the default)",
    )
    parser.add_argument(
        "--isa", help="cap our kernels, oneDNN, MKL and ATen: scalar, avx2, avx512, avx512_bf16 or amx"
    )
    parser.add_argument("--plot", help="draw the result to this file (linear, step, base_memory)")
    parser.add_argument("--format", default="nf4", help="of linear, quantize, dequantize; nf4 by default")
    parser.add_argument(
        "--plain", action="store_true", help="fp32 scales instead of double-quantised (linear)"
    )
    parser.add_argument(
        "--folder",
        help="where models lie (large_model, base_memory, shard_memory, experts_model,\n"
        "quantize_file, step, many_step, trl, load, format_memory), or the spill file (offload)",
    )
    parser.add_argument(
        "--mode", default="graph", help="of the training step (large_model, format_memory, many_step)"
    )
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument(
        "--case",
        type=names,
        help="only these cases, e.g. a,b,own (step, finetune, trl, load, delta_rule, shard_memory,\n"
        "base_memory), a shape, 4096x4096 (linear), adapters and tokens of each, 4x64 (many_step)",
    )
    parser.add_argument("--peers", type=names, help="only these peers, e.g. packed_eager (linear, step, trl)")
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        help="only these lengths, e.g. 1,2048 (linear, experts); tokens of a step (base_memory)",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="not by the clock, for a machine with other jobs; with --threads 1 (linear)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="where our step spends its time (step, many_step)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="of each variant of `step --case own` (300), of a case of base_memory (5), rounds of trl (7),\n"
        "of many_step (61 of one adapter, 9)",
    )
    parser.add_argument("--record", help="a file of what was measured, to go on from (base_memory)")
    arguments = parser.parse_args()
    if arguments.isa and os.environ.get("MONOGRAPH_ISA") != arguments.isa:
        os.environ["MONOGRAPH_ISA"] = arguments.isa
        for variable, caps in PEER_CAPS.items():
            if arguments.isa in caps:
                os.environ.setdefault(variable, caps[arguments.isa])
        os.execv(sys.executable, [sys.executable, "-m", "monograph.bench", *sys.argv[1:]])

    from monograph.bench.report import Report

    report = Report(arguments.bench, arguments.json)
    importlib.import_module(f"monograph.bench.{arguments.bench}").run(arguments, report)


if __name__ == "__main__":
    main()
