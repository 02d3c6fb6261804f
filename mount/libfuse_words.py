"""What libfuse and fusermount3 say when they cannot mount: they write it to stderr, and return no reason."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_STDERR = 2


@contextlib.contextmanager
def overheard() -> Iterator[list[str]]:
    """Gives a list that holds, after the block, the lines that were written to stderr meanwhile.

    They are passed on to stderr when the block ends well. Whatever else the process logs meanwhile is overheard too;
    so the block must be short.
    """
    lines: list[str] = []
    try:
        kept = os.dup(_STDERR)
    except OSError:  # closed: there is nobody to tell, and nothing to hear
        yield lines
        return
    words = os.memfd_create("kvfs-stderr", os.MFD_CLOEXEC)
    try:
        sys.stderr.flush()
        os.dup2(words, _STDERR)  # fusermount3 inherits it
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STDERR)
            said = os.pread(words, 1 << 16, 0)
            lines += [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        with contextlib.suppress(OSError):
            os.write(_STDERR, said)
    finally:
        os.close(words)
        os.close(kept)


def reason(lines: list[str]) -> str:
    """Why it did not work, in half a sentence."""
    if not lines:
        return "is fuse3 installed, and may you open /dev/fuse?"
    return lines[-1].removeprefix("fuse: ").removeprefix("fusermount3: ").removesuffix(".")
