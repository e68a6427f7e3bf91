"""The folders of this repository, installed inside of the package `octavo`; everything else is in pyproject.toml.

The package itself, `octavo/__init__.py`, belongs to `octavo-client` (proto/), which the server asks for.
"""

from setuptools import find_packages, setup

FOLDERS = ("wire", "blockmgr", "grammar", "model", "worker", "gateway", "cli")

setup(
    package_dir={
        "octavo.kserve": "proto/octavo/kserve",  # stubs that only the server needs
        "octavo.vllm": "proto/octavo/vllm",  # likewise
        **{f"octavo.{folder}": folder for folder in FOLDERS},
    },
    packages=[
        "octavo.kserve",
        "octavo.vllm",
        *(f"octavo.{folder}" for folder in FOLDERS),
        *(f"octavo.{folder}.{each}" for folder in FOLDERS for each in find_packages(folder)),
    ],
)
