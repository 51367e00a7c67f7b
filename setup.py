"""Build script: which folders become which packages. All other metadata is in pyproject.toml.

``csrc/`` and ``jit_flags/`` stand at the top of the repository and ship inside the package as ``fp4dispatch.csrc`` and
``fp4dispatch.jit_flags``.

``BUNDLE_KERNELS=DIR pip wheel .`` puts the kernels that ``fp4dispatch build --out DIR`` made into the wheel, as
``fp4dispatch/prebuilt``, where they are found without any compiler. That wheel is for one platform; it needs Linux.

The page of an index shows the README without the repository. ``PROJECT_URL=https://HOST/OWNER/fp4dispatch`` makes its
links and pictures absolute, to the tag of this version; without it, only the text of links stays.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PROJECT_URL = os.environ.get("PROJECT_URL", "").rstrip("/")
BUNDLE = os.environ.get("BUNDLE_KERNELS", "")


def refuse(why: str) -> SystemExit:
    """Return the error for a folder that cannot be embedded."""
    return SystemExit(f"BUNDLE_KERNELS={BUNDLE}: {why}\n  fix: make it with `fp4dispatch build --arch ... --out DIR`")


def bundled(version: str) -> list[Path]:
    """Return the entries of the folder, each checked to be one that this version will load."""
    entries = sorted(Path(BUNDLE).glob("kernels/*/*/*"))
    if not entries:
        raise refuse("it holds no finished kernel")
    for entry in entries:
        try:
            record = json.loads((entry / "entry.json").read_bytes())
            (entry / "proof.json").stat()
            library = hashlib.sha256((entry / "kernel.so").read_bytes()).hexdigest()
            if library != record["library_sha256"]:
                raise refuse(f"{entry / 'kernel.so'} is not the library that was built")
            if not record["pinned"]:
                raise refuse(f"{entry} is from a user's cache, which holds for one toolchain only")
            if record["request"]["package"] != version:
                raise refuse(f"{entry} was built by version {record['request']['package']}, this is {version}")
            for root, path, sha in record["files"]:
                if root == "src" and hashlib.sha256((Path("csrc") / path).read_bytes()).hexdigest() != sha:
                    raise refuse(f"{entry} was built from another csrc/{path} than this one")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refuse(f"{entry} is no finished kernel ({type(error).__name__}: {error})") from error
    return entries


def long_description(version: str) -> str:
    """Return the README, with no link and no picture that is relative to the repository."""
    text = Path("README.md").read_text("utf-8")
    picture = rf"![\1]({PROJECT_URL}/raw/v{version}/\2)\n" if PROJECT_URL else ""
    text = re.sub(r"!\[([^\]]+)\]\((?!https?://)([^)]+)\)\n", picture, text)
    absolute = rf"[\1]({PROJECT_URL}/blob/v{version}/\2)" if PROJECT_URL else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", absolute, text)


def project_version() -> str:
    """Return the version that pyproject.toml names."""
    found = re.search(r'^version = "([^"]+)"', Path("pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found
    return found[1]


class BuildPy(build_py):
    """Copies the finished kernels too; what an earlier build left in build/ never gets into a wheel."""

    def run(self) -> None:
        """Build, then embed."""
        super().run()
        if getattr(self, "editable_mode", False):
            if BUNDLE:
                raise refuse("an editable install carries no kernels; set FP4DISPATCH_CACHE_DIR to that folder instead")
            return
        target = Path(self.build_lib) / "fp4dispatch" / "prebuilt"
        if target.exists():
            shutil.rmtree(target)
        if BUNDLE:
            for entry in bundled(self.distribution.get_version()):
                shutil.copytree(entry, target / entry.relative_to(BUNDLE))


class Wheel(bdist_wheel):
    """Any Python 3; with kernels, of this platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: the kernels do not depend on Python's ABI."""
        tag = super().get_tag()
        if not BUNDLE:
            return tag
        if not tag[2].startswith("linux_"):
            raise refuse(f"kernels are for Linux, this is {tag[2]}")
        return ("py3", "none", tag[2])


class Bundle(Distribution):
    """Is a binary distribution where it carries kernels."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel belongs into platlib."""
        return bool(BUNDLE) or bool(super().has_ext_modules())


setup(
    long_description=long_description(project_version()),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["fp4dispatch", "fp4dispatch.*"]), "fp4dispatch.csrc", "fp4dispatch.jit_flags"],
    package_dir={"fp4dispatch.csrc": "csrc", "fp4dispatch.jit_flags": "jit_flags"},
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    distclass=Bundle,
)
