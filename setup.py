"""The CPU kernels: a plain shared library that ctypes loads. All else about the package is in pyproject.toml.

Without a C++ compiler the rest is installed all the same. Each file picks instruction sets itself and at run time, so
nothing here is specific to a machine.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("moe_runtime/kernels/native")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",  # a row's result is the same in every variant of a kernel
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-w",  # gcc 12 warns of its own headers
)

setup(
    ext_modules=[
        Extension(
            "moe_runtime.kernels.native._kernels",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            extra_compile_args=list(FLAGS),
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
