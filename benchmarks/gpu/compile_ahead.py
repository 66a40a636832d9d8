"""Compiles the Triton kernels for GPUs that need not be here, and says what each takes.

    python -m benchmarks.gpu.compile_ahead --write docs/gpu.md

Registers, spilled bytes and instructions come from the machine code (cuobjdump and nvdisasm, which
Triton brings), shared memory from Triton's metadata, widths of loads from the layouts it chose.
Exits with status 1 if a kernel spills, loads codes in pieces of less than 16 bytes, makes products
by other instructions than the rest, or flushes or fuses where codes are made.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tightkv.files import atomic_file
from tightkv.formats import BlockLayout, Granularity, TensorFormat
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels.triton import attention, write
from tightkv.kernels.triton.shapes import (
    PARTITION,
    AttentionShape,
    DeviceTraits,
    LayerShape,
    TensorShape,
    attention_shape,
    launch_options,
)

CAPABILITIES = (80, 90, 100)
KERNELS: dict[str, Any] = {
    "write": write.write_kernel,
    "prefill": attention.prefill_kernel,
    "decode": attention.decode_kernel,
    "reduce": attention.reduce_kernel,
}
BEGIN, END = "<!-- compile_ahead: begin -->", "<!-- compile_ahead: end -->"

_POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_UNITS = {0: "*i16", 2: "*i16", 3: "*i16", 7: "*i16", 10: "*fp16", 23: "*fp32"}
_CODES = {0: "*i8", 2: "*u8", 3: "*u8", 7: "*i16", 10: "*i16", 23: "*i32"}
_INDICES = {"query_start_loc", "seq_lens", "block_table"}
_FLOATS = {"softmax_scale", "softcap"}
# What the kernels do not specialize on divisibility by 16, and what need not be a multiple of it.
_ANY_INTEGER = {
    "num_tokens", "num_seqs", "min_queries", "window", "table_width", "first_seq", "num_heads",
    "num_partitions", "num_slots",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel for a format, head size and type of queries; `code` names its scales after a +."""

    kernel: str
    code: str
    head_size: int
    query_dtype: torch.dtype = torch.bfloat16
    group: int = 4
    extras: bool = False  # window, softcap and sinks
    quantized_query: bool = False

    def layer(self) -> LayerShape:
        name, *scales = self.code.split("+")
        tensor_format = TensorFormat(
            self.code,
            CODE_TYPES[name],
            dynamic="dynamic" in scales,
            static=Granularity.CHANNEL if "static" in scales else None,
        )
        layout = BlockLayout(tensor_format, tensor_format, 8, self.head_size, self.head_size, 16)
        return LayerShape.of(layout)

    def __str__(self) -> str:
        words = [self.kernel_name, self.code, self.head_size, self.query_name, self.group]
        return ", ".join(map(str, words))

    @property
    def kernel_name(self) -> str:
        return f"{self.kernel} (window, softcap, sinks)" if self.extras else self.kernel

    @property
    def query_name(self) -> str:
        name = str(self.query_dtype).removeprefix("torch.")
        return f"{name}, rounded to int8" if self.quantized_query else name


@dataclass(frozen=True)
class Compiled:
    """What came out."""

    registers: int
    spilled: int
    shared: int
    load_bytes: int
    instructions: int  # of a warp, for a tile of keys
    problems: tuple[str, ...]


def quick_variants() -> list[Variant]:
    """One of each kind."""
    return [
        Variant("write", "int8+static+dynamic", 128),
        Variant("write", "fp8_e4m3+static", 128),
        Variant("decode", "int8+static+dynamic", 128),
        Variant("decode", "fp8_e4m3+dynamic", 128),
        Variant("decode", "int8+static+dynamic", 128, quantized_query=True),
        Variant("prefill", "int8+static", 128),
        Variant("reduce", "int8+static", 128),
    ]


def all_variants() -> Iterator[Variant]:
    """Every format at head size 128, and the other sizes, query types and groups for some."""
    codes = [
        "float32", "float16", "bfloat16", "int8+static", "int8+dynamic", "int8+static+dynamic",
        "fp8_e4m3+static", "fp8_e4m3+dynamic", "fp8_e5m2",
    ]  # fmt: skip
    for kernel, code in itertools.product(("write", "prefill", "decode"), codes):
        yield Variant(kernel, code, 128)
    for kernel, size in itertools.product(("prefill", "decode"), (64, 96, 256)):
        yield Variant(kernel, "int8+static+dynamic", size)
        yield Variant(kernel, "float16", size)
    for kernel in ("prefill", "decode"):
        yield Variant(kernel, "int8+static+dynamic", 128, torch.float32, 7)
        yield Variant(kernel, "int8+static+dynamic", 128, torch.float16, 64)
        yield Variant(kernel, "fp8_e4m3+dynamic", 128, torch.float16, 1, extras=True)
        yield Variant(kernel, "int8+static", 128, quantized_query=True)
        yield Variant(kernel, "int8+static+dynamic", 128, quantized_query=True)
    for size in (64, 128, 256):
        yield Variant("reduce", "int8+static+dynamic", size)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile for a compute capability, 90 for 9.0."""
    kernel = KERNELS[variant.kernel]
    layer = variant.layer()
    traits = DeviceTraits(native_fp8=capability >= 89, ptx=True, f32_precision="tf32x3")
    constants: dict[str, Any] = {"L": layer, "TOKENS": write.TOKENS, "PARTITION": PARTITION}
    shape = constants["S"] = attention_shape(
        layer,
        variant.group,
        variant.query_dtype,
        traits,
        decode=variant.kernel in ("decode", "reduce"),
        window=variant.extras,
        softcap=variant.extras,
        sinks=variant.extras,
        quantized_query=variant.quantized_query,
    )
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: _type_of(name, variant, layer) for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and name not in _ANY_INTEGER | _FLOATS
    }
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {
        "write": write.LAUNCH_OPTIONS,
        "reduce": attention.REDUCE_OPTIONS,
    }.get(variant.kernel) or launch_options(shape)
    compiled = triton.compile(source, target=target, options=options)
    return _measure(variant, layer, shape, compiled)


def _type_of(name: str, variant: Variant, layer: LayerShape) -> str:
    if name in ("query", "key", "value"):
        return _POINTERS[variant.query_dtype]
    if name in ("k_codes", "v_codes"):
        tensor = layer.k if name == "k_codes" else layer.v
        return _codes_type(tensor, variant.kernel == "write")
    if name == "scales":
        return "*i16" if variant.kernel == "write" else "*fp16"
    if name in _INDICES:
        return "*i32"
    if name in ("slot_mapping", "clip_counts"):
        return "*i64"
    if name == "bad_tokens":
        return "*u8"
    if name in ("out", "part_sums", "part_weights", "sinks", "k_static", "v_static"):
        return "*fp32"
    return "fp32" if name in _FLOATS else "i32"


def _codes_type(tensor: TensorShape, written: bool) -> str:
    return (_CODES if written else _UNITS)[tensor.mantissa]


def _measure(variant: Variant, layer: LayerShape, shape: AttentionShape, compiled: Any) -> Compiled:
    ptx: str = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    problems = ["spills registers"] if spilled else []
    load_bytes = 0
    if variant.kernel in ("prefill", "decode"):
        load_bytes = _bytes_of_code_loads(compiled.asm["ttgir"], layer, shape)
        if load_bytes != 16 or not ("ld.global.v4" in ptx or "cp.async.cg" in ptx):
            problems.append(f"loads codes {load_bytes} bytes at a time")
        if "wgmma" in ptx or "tcgen05" in ptx:
            problems.append("makes products in another order than those of a few rows")
    if variant.kernel == "write":
        words = (".ftz", "fma.", "div.full", "div.approx", "rcp.")
        problems += [f"has {word} where codes are made" for word in words if word in ptx]
    return Compiled(
        usage["REG"],
        spilled,
        compiled.metadata.shared,
        load_bytes,
        _instructions_of_the_largest_loop(compiled.asm["cubin"]),
        tuple(problems),
    )


def _bytes_of_code_loads(ttgir: str, layer: LayerShape, shape: AttentionShape) -> int:
    """The fewest contiguous bytes of K or V that a thread loads, by the tiles' layouts."""
    tiles = {
        (layer.k.units, shape.tokens // layer.k.pack),
        (shape.tokens // layer.v.interleave, layer.v.tile // layer.v.pack),
    }
    layouts = {
        name: int(rows) * int(columns)
        for name, rows, columns in re.findall(
            r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(\d+), (\d+)\]", ttgir, re.MULTILINE
        )
    }
    tensor = r"tensor<(\d+)x(\d+)x!tt\.ptr<[a-z]+(\d+)>, (#\w+)>"
    loads = re.findall(rf"(?:tt\.load|async_copy_global_to_local).*?: {tensor}", ttgir)
    return min(
        (
            layouts[name] * int(bits) // 8
            for rows, columns, bits, name in loads
            if (int(rows), int(columns)) in tiles
        ),
        default=0,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    text = _asked(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def _instructions_of_the_largest_loop(cubin: bytes) -> int:
    """Of loops that have none inside: of attention, that over tiles of keys.

    Machine code ends with a jump to itself, so that without a loop it is 1.
    """
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    count = 0
    for line in _asked(cubin, triton.knobs.nvidia.nvdisasm.path, "-c").splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]+\*/", line):
            count += 1
            target = re.search(r"\bBRA\b.*(\.L_x_\d+)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], count))
    inner = [
        end - begin
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]
    return max(inner, default=0)


def _asked(cubin: bytes, tool: str, option: str) -> str:
    """What a tool of CUDA's says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _table(results: dict[tuple[Variant, int], Compiled], capabilities: Sequence[int]) -> list[str]:
    """Markdown: a line per variant; registers, spilled bytes and shared memory per capability."""
    heads = [f"sm_{capability}" for capability in capabilities]
    lines = [
        "| kernel | format of K and V | size | queries | heads per KV head | "
        + " | ".join(heads)
        + " |",
        "|---" * (5 + len(heads)) + "|",
    ]
    for variant in dict.fromkeys(variant for variant, _ in results):
        cells = []
        for capability in capabilities:
            result = results[variant, capability]
            cells.append(f"{result.registers}, {result.spilled}, {result.shared:,}")
        words = [variant.kernel_name, variant.code, variant.head_size, variant.query_name]
        lines.append(f"| {' | '.join(map(str, [*words, variant.group, *cells]))} |")
    return lines


def _write_into(page: Path, lines: Sequence[str]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    with atomic_file(page) as file:
        file.write("\n".join([before + BEGIN, *lines, END + after]).encode())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one variant of each kind")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--write", type=Path, help="page whose table to replace")
    options = parser.parse_args()
    variants = quick_variants() if options.quick else list(all_variants())
    variants = [variant for variant in variants if variant.kernel in options.kernels]
    results = {}
    for variant, capability in itertools.product(variants, options.capabilities):
        result = results[variant, capability] = compile_variant(variant, capability)
        numbers = f"{result.registers} registers"
        if variant.kernel in ("prefill", "decode"):
            numbers += f", {result.instructions} instructions per warp and tile"
        words = "; ".join(result.problems) or "fine"
        print(f"sm_{capability}  {variant}: {numbers}, {words}", flush=True)
    if options.write:
        _write_into(options.write, _table(results, options.capabilities))
    return 1 if any(result.problems for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
