"""Compile every kernel for Hopper, without a GPU, and look at the machine code (`make check-gpu-code`).

Triton's kernels are those of `prl_triton.AOT`, in the configurations that are shipped; CUDA's are what csrc/cuda compiles to,
as the package builds it. Of every kernel: no spills to local memory, registers and shared memory within what the hardware has.
Of those that say so: tensor-core instructions (QGMMA for FP8, HGMMA for bfloat16), asynchronous loads (TMA or LDGSTS), loads
and stores of 16 bytes. Any warning of nvcc counts too: it is how a serialised wgmma or a spill shows.

Exit codes: 0 all is well, 1 a kernel is not (named, with the reason), 2 wrong usage. Without nvcc the CUDA part is skipped, and
says so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_REGISTERS = 255
MOST_SHARED = 232448
"""Bytes that a block can have on sm_90."""

LOADS = re.compile(r"UTMALDG|LDGSTS")
LOADS_16 = re.compile(r"(LDG|LDGSTS)\.\S*128|UTMALDG|UBLKCP")
STORES_16 = re.compile(r"STG\.\S*128|UTMASTG")
SPILLS = re.compile(r"(STL|LDL)\b")
TENSOR = re.compile(r"QGMMA|HGMMA|IGMMA|HMMA|IMMA")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Demand:
    """What a kernel's machine code must show beside no spills."""

    tensor_core: str | None = None
    async_loads: bool = False
    sixteen_byte_access: bool = False


@dataclass(frozen=True)
class Code:
    """One compiled kernel."""

    kernel: str
    configuration: str
    registers: int
    spills: int
    """Instructions that move to or from local memory."""
    shared: int
    """Bytes a block."""
    tensor: dict[str, int]
    """Tensor-core instruction → how many."""
    loads: dict[str, int]
    """Asynchronous load instruction → how many."""
    wide: tuple[int, int]
    """Loads and stores of 16 bytes (or by TMA)."""


def tool(name: str) -> str:
    """A disassembler out of Triton's wheel, which brings its own."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        raise SystemExit("check-gpu-code: triton is not installed")
    return str(Path(found.origin).parent / "backends" / "nvidia" / "bin" / name)


def functions(binary: Path) -> dict[str, tuple[int, str]]:
    """Mangled name → (registers, disassembly) of every kernel in a cubin or an object."""
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers = {name: int(n) for name, n in re.findall(r"Function (\S+):\s+REG:(\d+)", usage)}
    code = subprocess.run([tool("cuobjdump"), "-sass", binary], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"Function : (\S+)", code)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    if bodies.keys() != registers.keys():
        raise SystemExit(f"check-gpu-code: {binary.name}: cuobjdump lists {sorted(registers)}, disassembles {sorted(bodies)}")
    return {name: (registers[name], bodies[name]) for name in bodies}


def inspect(kernel: str, configuration: str, shared: int, registers: int, sass: str) -> Code:
    opcodes = Counter(INSTRUCTION.findall(sass))

    def count(what: re.Pattern[str]) -> int:
        return sum(n for opcode, n in opcodes.items() if what.match(opcode))

    def named(what: re.Pattern[str]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for opcode, n in sorted(opcodes.items()):
            if what.match(opcode):
                totals[opcode.split(".")[0]] += n
        return dict(totals)

    wide = (count(LOADS_16), count(STORES_16))
    return Code(kernel, configuration, registers, count(SPILLS), shared, named(TENSOR), named(LOADS), wide)


def faults(code: Code, demand: Demand) -> list[str]:
    """Why this code will not do, in words."""
    found = []
    if code.spills:
        found.append(f"{code.spills} spills to local memory")
    if code.registers > MOST_REGISTERS:
        found.append(f"{code.registers} registers, at most {MOST_REGISTERS}")
    if code.shared > MOST_SHARED:
        found.append(f"{code.shared} bytes of shared memory, at most {MOST_SHARED}")
    if demand.tensor_core and not code.tensor.get(demand.tensor_core):
        found.append(f"no {demand.tensor_core}")
    if demand.async_loads and not code.loads:
        found.append("no asynchronous loads (UTMALDG, LDGSTS)")
    if demand.sixteen_byte_access:
        found += [f"no {what} of 16 bytes" for what, n in zip(("loads", "stores"), code.wide, strict=True) if not n]
    return found


Checked = tuple[Code | None, str, list[str]]
"""The code, if it compiled; the kernel's name; what is wrong."""


def check_aot(aot: Any) -> Checked:
    """Compile and check one entry of an AOT list (`prl_triton.aot.Aot`)."""
    from prl_triton.aot import compile_for_hopper

    try:
        compiled = compile_for_hopper(aot)
    except Exception as e:  # a compiler that fails has no type of its own
        return None, aot.name, [f"it does not compile: {type(e).__name__}: {e}"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        ((registers, sass),) = functions(Path(file.name)).values()
    constants = [f"{name}={value}" for name, value in aot.constexprs.items()]
    configuration = f"{' '.join([*aot.signature.values(), *constants])}; {aot.num_warps} warps, {aot.num_stages} stages"
    code = inspect(aot.name.partition(",")[0], configuration, compiled.metadata.shared, registers, sass)
    return code, aot.name, faults(code, Demand(aot.tensor_core, aot.async_loads, aot.sixteen_byte_access))


def _check_entry(i: int) -> Checked:
    from prl_triton import AOT

    return check_aot(AOT[i])


def check_triton(workers: int) -> Iterable[Checked]:
    os.environ.pop("TRITON_INTERPRET", None)
    from prl_triton import AOT

    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_check_entry, range(len(AOT)))


def cuda_build() -> Any:
    """csrc/cuda/build.py."""
    spec = importlib.util.spec_from_file_location("prl_cuda_build", ROOT / "csrc" / "cuda" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_cuda(nvcc: str, target: Path) -> Iterable[Checked]:
    """Build the object as `target` and check it. All of csrc/cuda is GEMMs: wgmma fed by TMA, stores of 16 bytes."""
    try:
        said = cuda_build().compile_object(nvcc, target).strip()
    except subprocess.CalledProcessError as e:
        yield None, "csrc/cuda", [f"it does not compile: {e.output}"]
        return
    if said:
        yield None, "csrc/cuda", [f"nvcc warns: {said}"]
    shared = ctypes.CDLL(str(target)).prl_cuda_shared_bytes()
    for mangled, (registers, sass) in sorted(functions(target).items()):
        name = readable(mangled)
        kernel, _, configuration = name.partition("<")
        code = inspect(f"cuda.{kernel}", configuration.rstrip(">"), shared, registers, sass)
        yield code, f"cuda.{name}", faults(code, Demand("QGMMA", True, True))


def readable(mangled: str) -> str:
    """name<arguments> of a mangled kernel, without namespaces and parameters; as it is where there is no c++filt."""
    try:
        name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return mangled
    return name.removeprefix("void ").partition("(")[0].rpartition("::")[2]


def table(codes: list[Code]) -> str:
    rows = [("kernel", "registers", "spills", "shared", "tensor cores", "asynchronous", "16 B ld/st", "configuration")]
    for c in codes:
        tensor, loads = (" ".join(f"{name} {n}" for name, n in of.items()) or "-" for of in (c.tensor, c.loads))
        figures = (str(c.registers), str(c.spills), str(c.shared), tensor, loads, "/".join(map(str, c.wide)))
        rows.append((c.kernel, *figures, c.configuration))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="compile that many at a time")
    given = parser.parse_args(args)
    skipped = []
    checked = list(check_triton(given.workers))
    build = cuda_build()
    try:
        nvcc = build.find_nvcc()
        with tempfile.TemporaryDirectory() as folder:
            checked += check_cuda(nvcc, Path(folder) / "kernels.so")
    except build.NoCompiler as e:
        skipped.append(f"csrc/cuda: {e}")
    codes = [code for code, _, _ in checked if code]
    print(table(codes))
    for line in skipped:
        print(f"skipped: {line}")
    wrong = [f"{name}: {fault}" for _, name, found in checked for fault in found]
    if given.json:
        kept = {"kernels": [asdict(code) for code in codes], "skipped": skipped, "faults": wrong}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    for line in wrong:
        print(f"check-gpu-code: {line}", file=sys.stderr)
    print(f"{len(codes)} kernels, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
