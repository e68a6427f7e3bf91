"""The folders of this repository, installed as the one package `octavo`; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("wire", "blockmgr", "grammar", "model", "worker", "gateway", "cli")
SUBPACKAGES = [f"octavo.{folder}.{each}" for folder in FOLDERS for each in find_packages(folder)]

setup(
    package_dir={"octavo": "proto/octavo", **{f"octavo.{folder}": folder for folder in FOLDERS}},
    packages=[
        *find_packages("proto", include=["octavo", "octavo.*"]),
        *(f"octavo.{folder}" for folder in FOLDERS),
        *SUBPACKAGES,
    ],
)
