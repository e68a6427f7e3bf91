"""The process in which chat templates of checkpoints run: foreign code, which may loop or fill memory.

Started by `gateway.text.render_pool` with the pid of its parent. Reads a frame, answers with a frame, until its input
ends:

    length (4 bytes, big-endian), JSON {"template", "chat", "max_bytes", "cpu_s", ...}
    length, kind (1 byte), text

The kernel ends it where a rendering takes more CPU time than `cpu_s`; its memory is limited, and with it what it can
write. It ends with its parent. Imports little, so that another one is there within a tenth of a second.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from typing import BinaryIO

from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError
from octavo.wire.host import die_with

RENDERED, REFUSED, TOO_LONG, NO_MEMORY = b"R", b"E", b"L", b"M"
KNOWN_TEMPLATES = 16
_MAX_REASON = 2000


def main() -> None:
    """argv: pid of the parent, bytes that may be taken beyond those of an idle process."""
    parent, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: the parent ends it, after its requests
        signal.signal(number, signal.SIG_IGN)
    _limit(memory_bytes)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    templates = OrderedDict[str, ChatTemplate]()
    while (frame := _read(source)) is not None:
        kind, text = _answer(frame, templates)
        sink.write(struct.pack(">I", len(text) + 1) + kind + text)
        sink.flush()
        if kind == NO_MEMORY:
            return


def _limit(memory_bytes: int) -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/statm") as file:
            now_bytes = int(file.read().split()[0]) * page_bytes
    except OSError:
        now_bytes = 1 << 30
    for limit, value in (
        (resource.RLIMIT_AS, now_bytes + memory_bytes),
        (resource.RLIMIT_CORE, 0),  # prompts are in it
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    frame = source.read(length)
    return frame if len(frame) == length else None


def _answer(frame: bytes, templates: "OrderedDict[str, ChatTemplate]") -> tuple[bytes, bytes]:
    try:
        asked = json.loads(frame)
        if "source" in asked:
            templates[asked["template"]] = ChatTemplate(asked["source"], asked["special_tokens"])
            if len(templates) > KNOWN_TEMPLATES:
                templates.popitem(last=False)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])  # SIGPROF ends the process: it has no handler
        text = templates[asked["template"]].render(ChatInput(**asked["chat"]), max_bytes=asked["max_bytes"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        return RENDERED, text.encode("utf-8", "surrogatepass")
    except PromptTooLong as error:
        return TOO_LONG, str(error.num_bytes).encode()
    except TemplateError as error:
        return REFUSED, str(error)[:_MAX_REASON].encode("utf-8", "surrogatepass")
    except MemoryError:
        return NO_MEMORY, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
