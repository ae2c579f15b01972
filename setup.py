"""The packages, found in the four folders, and the optional compiled kernels for CPUs; all else is in pyproject.toml.

The kernels need neither PyTorch's headers nor Python's. Where they cannot be built, the package installs without them
and computes with plain PyTorch.
"""

import sys
from glob import glob

from setuptools import Extension, find_packages, setup

FOLDERS = {
    "triforce.cli": "triforce_cli",
    "triforce.offload": "offload",
    "triforce.tp": "tp",
    "triforce.kernels": "kernels",
}
"""The folder of each package; `triforce` itself is a namespace."""

FLAGS = [] if sys.platform == "win32" else ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{sub}" for sub in find_packages(folder)))
    ],
    ext_modules=[
        Extension(
            "triforce.kernels.cpu._compiled",
            sorted(glob("kernels/cpu/source/**/*.c", recursive=True)),
            depends=sorted(glob("kernels/cpu/source/**/*.h", recursive=True)),
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp", "-lm"] if FLAGS else [],
            optional=True,
        )
    ],
)
