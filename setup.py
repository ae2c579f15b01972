"""The optional compiled kernels for CPUs; everything else about the package is in pyproject.toml.

They need neither PyTorch's headers nor Python's. Where they cannot be built, the package installs without them and
computes with plain PyTorch.
"""

import sys
from glob import glob

from setuptools import Extension, setup

FLAGS = [] if sys.platform == "win32" else ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "triforce.kernels._cpu",
            sorted(glob("kernels/cpu/*.c")),
            depends=sorted(glob("kernels/cpu/*.h")),
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp", "-lm"] if FLAGS else [],
            optional=True,
        )
    ]
)
