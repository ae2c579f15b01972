"""The optional compiled kernels for CPUs; everything else about the package is in pyproject.toml.

They need neither PyTorch's headers nor Python's. Where they cannot be built, the package installs without them and
computes with plain PyTorch.
"""

import sys

from setuptools import Extension, setup

FLAGS = [] if sys.platform == "win32" else ["-O3", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "triforce.kernels._cpu",
            ["kernels/cpu/features.c", "kernels/cpu/layers.c"],
            depends=["kernels/cpu/cpu.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"] if FLAGS else [],
            optional=True,
        )
    ]
)
