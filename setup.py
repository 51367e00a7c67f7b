"""Build script: which folders become which packages. All other metadata is in pyproject.toml.

``csrc/`` and ``jit_flags/`` stand at the top of the repository and ship inside the package as ``fp4dispatch.csrc`` and
``fp4dispatch.jit_flags``.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fp4dispatch", "fp4dispatch.*"]), "fp4dispatch.csrc", "fp4dispatch.jit_flags"],
    package_dir={"fp4dispatch.csrc": "csrc", "fp4dispatch.jit_flags": "jit_flags"},
)
