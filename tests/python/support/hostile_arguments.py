"""Calls every operator with arguments that are wrong in one to three places, drawn from its schema.

    PYTHONPATH=tests/python python -m support.hostile_arguments --calls 20000    # all operators
    PYTHONPATH=tests/python python -m support.hostile_arguments --only 137       # the call a failure names

A call may be accepted, or refused with an error that names the operator. All else is a failure: a crash, a
hang, an error of another kind, or (with --portable) a result that is not the portable implementation's. Calls
are numbered; number and seed alone decide what a call is. Under AddressSanitizer: `.ci/run asan`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import mmap
import os
import pkgutil
import re
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch

import monograph.bench.roofline  # the operators of benchmarks too
import monograph.ops
from support import hostile_calls

SECONDS = 60  # for a hundred calls
INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    31,
    64,
    255,
    257,
    4096,
    2**31 - 1,
    2**31,
    2**45,
    2**56,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e39, 1e300, 1e-46, 1e-300)
OTHER_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn),
)


HUGE_AND_EMPTY = ((2**62, 0), (0, 2**62), (2**40, 0), (0, 2**31, 2**31), (2**31, 0, 2**30), (2**31, 2**30, 0))


def operators() -> list[str]:
    """The names of all operators that the library and its Python files registered, but for regions, slices of
    tokens and experts over ranks: a layer that was taken over calls those (test_regions.py,
    test_token_slices.py, test_ep_hostile.py, test_ep_norm.py)."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.split("::")[1].split(".")[0] for name in names if name.startswith("monograph::")}
    layers = {"region", "region_backward", "token_slices", "token_slices_backward"}
    return sorted(found - layers - {"ep_experts", "ep_experts_backward", "spread_norm"})


# What can be wrong with a tensor. Copies are of exact size, so that a sanitizer sees each byte beyond.


def _shape(r: Random, t: torch.Tensor) -> torch.Tensor:
    shape = list(t.shape) or [1]
    i = r.randrange(len(shape))
    shape[i] = r.choice((0, 1, shape[i] - 1 if shape[i] else 1, shape[i] + 1, 2 * shape[i], shape[i] // 2))
    return torch.ones(shape, dtype=t.dtype)


def _dimensions(r: Random, t: torch.Tensor) -> torch.Tensor:
    some = (t.reshape(-1), t.unsqueeze(0), t.unsqueeze(-1), t[None, None], torch.ones((), dtype=t.dtype))
    more = (
        torch.ones([1] * max(t.dim(), 1), dtype=t.dtype),
        t.reshape(-1)[:0],
        t[..., None].mT if t.dim() else t,
    )
    return r.choice((*some, *more)).clone()


def _strides(r: Random, t: torch.Tensor) -> torch.Tensor:
    if t.dim() == 0:
        return t.expand(3)
    i = r.randrange(t.dim())
    doubled = torch.ones([2 * n if d == i else n for d, n in enumerate(t.shape)], dtype=t.dtype)
    step = doubled[(slice(None),) * i + (slice(None, None, 2),)]
    wide = torch.ones([*t.shape[:-1], t.shape[-1] + 3], dtype=t.dtype)[..., 1 : t.shape[-1] + 1]
    first = t[(slice(None),) * i + (slice(0, 1),)]
    overlapping = torch.ones(sum(t.shape) + 1, dtype=t.dtype).as_strided(t.shape, [1] * t.dim())
    turned = t.transpose(0, -1).contiguous().transpose(0, -1)
    return r.choice((step, wide, first.expand(t.shape), overlapping, turned, t.transpose(0, -1)))


def _contents(r: Random, t: torch.Tensor) -> torch.Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    if t.numel() == 0 or t.dtype in (torch.bool, torch.float8_e4m3fn) or t.is_complex():
        return t
    for _ in range(r.randrange(1, 3)):
        place = r.randrange(t.numel())
        if t.is_floating_point():
            t.view(-1)[place] = torch.tensor(r.choice(FLOATS), dtype=torch.float64).to(t.dtype)
        else:
            limits = torch.iinfo(t.dtype)
            number = r.choice((*INTEGERS, r.randrange(300)))
            t.view(-1)[place] = min(max(number, limits.min), limits.max)
    return t


def _kind(r: Random, t: torch.Tensor) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: t.to("meta"),
        lambda: (t.float() if t.dtype == torch.float8_e4m3fn else t).to_sparse(),
        lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
        lambda: torch.empty(r.choice(HUGE_AND_EMPTY), dtype=t.dtype),
        lambda: 3,
        lambda: [t],
        lambda: torch.ones(t.shape, dtype=torch.complex64).conj().imag,  # negated when it is read
    )
    return r.choice(kinds)()


def spoil_tensor(r: Random, t: torch.Tensor | None) -> Any:
    if t is None:
        return torch.ones(r.choice(((), (1,), (3, 4), (0,))), dtype=r.choice(OTHER_DTYPES))
    if not isinstance(t, torch.Tensor) or t.is_sparse or t.is_quantized or t.is_meta:
        return t
    if max(t.shape, default=0) > 2**20:
        return t
    if r.random() < 0.15:
        return t.to(r.choice(OTHER_DTYPES))
    return r.choice((_shape, _shape, _dimensions, _strides, _contents, _kind))(r, t)


def spoil_list(r: Random, given: list[Any], spoil: Callable[[Random, Any], Any]) -> list[Any]:
    changed = list(given)
    how = r.randrange(5)
    if how == 0 or not changed:
        return r.choice(([], [*changed, *changed], [*changed, spoil(r, None)], changed[:-1]))
    i = r.randrange(len(changed))
    if how == 1:
        del changed[i]
    elif how == 2:
        changed.insert(i, changed[r.randrange(len(changed))])
    else:
        changed[i] = spoil(r, changed[i])
    return changed


def spoil_int(r: Random, n: Any) -> Any:
    return r.choice((*INTEGERS, *((n - 1, n + 1, 2 * n, -n) if isinstance(n, int) else ()), 2**64, 1.5, None))


def spoil_number(r: Random, _: Any) -> Any:
    return r.choice((*FLOATS, None))


def spoil(r: Random, kind: str, value: Any) -> Any:
    """Another value for an argument whose schema type is `kind`."""
    kind = re.sub(r"\([a-z]!\)", "", kind).rstrip("?")
    if kind in ("Tensor", "Optional[Tensor]"):
        return spoil_tensor(r, value)
    if kind == "List[Tensor]":
        return spoil_list(r, value, spoil_tensor)
    if kind in ("List[int]", "List[SymInt]"):
        changed = spoil_list(r, value, spoil_int)
        if len(changed) > 3 and r.random() < 0.3:  # shapes whose product overflows
            changed[-2:] = r.choice(([2**32, 2**32], [2**62, 0], [0, 2**63 - 1], [2**60, 16], [2**28, 2**28]))
        return changed
    if kind == "List[float]":
        return spoil_list(r, value, spoil_number)
    if kind == "List[bool]":
        return spoil_list(r, value, lambda _, flag: not flag)
    if kind in ("int", "SymInt"):
        return r.choice(OTHER_DTYPES) if isinstance(value, torch.dtype) else spoil_int(r, value)
    if kind == "float":
        return spoil_number(r, value)
    if kind == "bool":
        return not value
    raise NotImplementedError(f"no way to spoil an argument of type {kind}")


def make_call(seed: int, number: int) -> tuple[str, list[Any]]:
    """The operator and the arguments of a call; `seed` and `number` alone decide."""
    r = Random(f"{seed} {number}")
    names = operators()
    name = names[number % len(names)]
    if not hasattr(hostile_calls, name):
        raise NotImplementedError(f"operator {name} has no valid call in hostile_calls.py")
    arguments = getattr(hostile_calls, name)(r)
    schema = getattr(torch.ops.monograph, name).default._schema
    for _ in range(r.choice((0, 1, 1, 1, 2, 3)) if arguments else 0):
        i = r.randrange(len(arguments))
        arguments[i] = spoil(r, str(schema.arguments[i].type), arguments[i])
    if r.random() < 0.1:  # one tensor twice, or memory shared by two
        tensors = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        if len(tensors) > 1:
            i, j = r.sample(tensors, 2)
            arguments[i] = arguments[j]
    return name, arguments


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_sparse or value.is_contiguous() else f" strides {tuple(value.stride())}"
        shown = 0 < value.numel() < 9 and value.device.type == "cpu" and value.dtype != torch.quint8
        shown = shown and not value.is_sparse
        small = f" {value.tolist()}" if shown else ""
        return f"{value.device.type} {str(value.dtype)[6:]} {list(value.shape)}{strides}{small}"
    if isinstance(value, list):
        return f"[{', '.join(describe(each) for each in value)}]"
    return repr(value)


def portable(name: str) -> Callable[..., Any] | None:
    """The implementation in aten operations, by the convention of its name."""
    for module in pkgutil.iter_modules(monograph.ops.__path__, "monograph.ops."):
        with contextlib.suppress(ImportError):  # a provider whose library is not installed
            found = getattr(importlib.import_module(module.name), f"portable_{name}", None)
            if found is not None:
                return found
    return None


def well_said(name: str, error: Exception) -> bool:
    """The error names the operator, or the one it is made of, or torch itself refused the call."""
    text = re.sub(r"^[\w()]+, [\w/.]+:\d+, ", "", str(error))
    if text.startswith((f"Could not run 'monograph::{name}'", "Not yet supported ScalarType")):
        return True
    if "negation inputs" in text or text == "Expected Tensor but got None" or "MathBitsFallback" in text:
        return True  # torch's fallback for negated tensors takes none that is written
    own = re.match(r"(monograph::)?([a-z_0-9]+)(\(\))?:? ", text)
    # experts_slots and its gradient are made of experts and its own.
    made_of = own is not None and (
        own[2] in (name, name.replace("_slots", "")) or own[2] in name or name.startswith("linear")
    )
    return isinstance(error, (RuntimeError, ValueError, TypeError)) and own is not None and made_of


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _backward(result: Any) -> None:
    wanted = [t for t in _tensors(result) if t.requires_grad and t.numel() < 2**20]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])


def _compare(name: str, got: Any, want: Any) -> None:
    got, want = _tensors(got), _tensors(want)
    assert len(got) == len(want), f"{len(got)} results, the portable implementation gives {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"result {i} has shape {list(a.shape)}, portable {list(b.shape)}"
        assert a.dtype == b.dtype, f"result {i} is {a.dtype}, portable {b.dtype}"
        a, b = a.detach().double(), b.detach().double()
        both = a.isfinite() & b.isfinite()
        distance, size = (a - b)[both].norm().item(), b[both].norm().item()
        assert distance <= 0.05 * size + 1e-2, f"result {i} is {distance} from the portable of norm {size}"


def run_call(seed: int, number: int, with_portable: bool) -> str:
    """What became of a call: "accepted" or "refused". Raises AssertionError for what must not be."""
    name, arguments = make_call(seed, number)
    r = Random(f"{seed} {number} gradient")
    if r.random() < 0.5 and name not in ("adamw", "adamw_update", "dequantize_out", "limit_move"):
        for t in _tensors(arguments):
            if t.is_floating_point() and not t.is_sparse and not t.is_quantized:
                with contextlib.suppress(RuntimeError):  # an expanded view of a leaf
                    t.requires_grad_()
    shown = f"{name}({', '.join(describe(a) for a in arguments)})"
    typed_wrong = False
    try:
        result = getattr(torch.ops.monograph, name)(*arguments)
        _backward(result)
    except Exception as error:
        if not well_said(name, error):
            raise AssertionError(f"call {number}: {shown}\n{type(error).__name__}: {error}") from None
        result, typed_wrong = None, "monograph::" in str(error)
    # What the schema refuses never reaches an implementation.
    function = portable(name) if with_portable and not typed_wrong else None
    if function is not None and not any(t.is_meta for t in _tensors(arguments)):
        try:
            with torch.no_grad():
                other = function(*arguments)
        except Exception as error:
            if result is not None or not well_said(name, error):
                text = f"portable, call {number}: {shown}\n{type(error).__name__}: {error}"
                raise AssertionError(text) from None
        else:
            if result is not None and name != "varlen_attention_backward":  # it trusts out and lse
                try:
                    _compare(name, result, other)
                except AssertionError as error:
                    raise AssertionError(f"call {number}: {shown}\n{error}") from None
    return "refused" if result is None else "accepted"


def run(seed: int, numbers: range, with_portable: bool, status: mmap.mmap | None = None) -> dict[str, int]:
    """Counts of what became of the calls. The number of the call under way stands in `status`."""
    warnings.filterwarnings("ignore")
    counts = {"accepted": 0, "refused": 0, "failed": 0}
    for i, number in enumerate(numbers):
        if i % 100 == 0:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
        if status is not None:
            status[:8] = number.to_bytes(8, "little")
        try:
            counts[run_call(seed, number, with_portable)] += 1
        except AssertionError as error:
            counts["failed"] += 1
            print(error, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one call")
    parser.add_argument("--portable", action="store_true", help="the portable implementations too")
    parser.add_argument("--status", help="a file that holds the number of the call under way")
    options = parser.parse_args()
    status = None
    if options.status:
        with open(options.status, "w+b") as file:
            file.write(bytes(8))
            file.flush()
            status = mmap.mmap(file.fileno(), 8)
    if options.only is not None:
        name, arguments = make_call(options.seed, options.only)
        print(f"{name}({', '.join(describe(a) for a in arguments)})", flush=True)
    numbers = range(options.calls) if options.only is None else range(options.only, options.only + 1)
    counts = run(options.seed, numbers, options.portable, status)
    print(f"{len(operators())} operators, {len(numbers)} calls: {counts}", flush=True)
    os._exit(counts["failed"] > 0)  # the sanitizer's own end takes seconds


if __name__ == "__main__":
    main()
