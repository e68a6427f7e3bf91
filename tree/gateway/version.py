"""The version of the installed package; "dev" from a checkout that is not installed."""

from importlib import metadata

try:
    VERSION = metadata.version("octavo")
except metadata.PackageNotFoundError:
    VERSION = "dev"
