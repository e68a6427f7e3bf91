"""Processes below another one, which may end while they are looked at."""

import os

import psutil


def live_children(word: str, parent_pid: int | None = None) -> list[psutil.Process]:
    """The live processes below this one, or below another, that have the word in their command line: a subcommand or
    the name of a module. One that ends meanwhile is left out."""
    found = []
    for child in psutil.Process(parent_pid or os.getpid()).children(recursive=True):
        try:
            if word in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
