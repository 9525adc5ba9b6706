"""Builds the compiled library of `common/native` with the package; the rest is in pyproject.toml.

Sources named in `PER_LEVEL` are compiled once for each set of instructions that a CPU may have, and
the library picks at run time. A build without a C++ compiler succeeds: Kvass then says that it is
slower, and why (`common/native/library.py`).
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("common/native/src")
ONCE = ("levels", "threads")
PER_LEVEL = ("append", "attention", "copies", "layers", "products", "reads", "rows")
# Products and sums are fused here where the source says so only, so that all levels agree.
EXACT = ("append", "attention")
X86_LEVELS = {
    "portable": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512vbmi", "-mavx512vnni", "-mavx512bf16"],
}
# One rounding of a product and a sum where the machine has such an instruction, and no other
# liberty with numbers: the order of sums is what the sources say.
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-pthread"]
# GCC 12 warns of its own header of intrinsics.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]


class BuildNative(build_ext):
    """Compile each source for each level, then link them into one plain shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name("libkvass.so"))

    def build_extension(self, extension: Extension) -> None:
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        levels = X86_LEVELS if is_x86 else {"portable": []}
        works = [(name, [], "once") for name in ONCE]
        for level, flags in levels.items():
            works += [(name, flags, level) for name in PER_LEVEL]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda work: self._compile(*work), works))
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread"], target_lang="c++"
        )

    def _compile(self, name: str, flags: list[str], level: str) -> str:
        macros = [("KVASS_LEVEL", level), ("KVASS_SOURCES", f'"{sources_digest()}"')]
        (made,) = self.compiler.compile(
            [str(SOURCES / f"{name}.cpp")],
            output_dir=str(Path(self.build_temp, level)),
            macros=macros,
            depends=[str(path) for path in SOURCES.iterdir()],
            extra_postargs=[*FLAGS, *flags, *(["-ffp-contract=off"] if name in EXACT else [])],
        )
        return made


class PlatformWheel(bdist_wheel):
    """One wheel for every Python: the library is loaded by ctypes and knows none."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def sources_digest() -> str:
    """Name what the library was built from: `library.py` refuses one that is not of its tree."""
    digest = blake2b(digest_size=16)
    for path in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


setup(
    ext_modules=[Extension("kvass.common.native.libkvass", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
