"""What the files that are no chunks contain: README.txt, namespace.json, and those in `.kvfs`.

README.txt and namespace.json never change. status.json, metrics and config.toml are made when they are opened. The
events are a file that grows, and is cut at its start now and then; reading them never waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

import kvfs
from kvfs import config, namespace
from kvfs.mount.nodes import Fixed, Role
from kvfs.store import Store

README = """\
This is kvfs: the KV cache of LLM inference engines on this node, in RAM and on NVMe, as files.

  ls -ltu <namespace>/chunks     chunks by last use (mtime: stored, atime: last load by an engine)
  ls -R <namespace>/prefixes     the same chunks as a tree: what continues what
  getfattr -d <chunk>            tier, hits, position, tokens, parent, checksum, dirty, key, pin
  setfattr -n user.kvfs.pin -v 2h X  keep a chunk, a prefix or all of a namespace; or: forever, no
  setfattr -n user.kvfs.quota -v 20GiB <namespace>   most it may have; user.kvfs.max_age -v 3d: how long unused
  du -sh <namespace>; df -h .    what it takes, what there is
  cp <chunk> /elsewhere          export: each chunk is a safetensors file that proves its own identity
  cp -a /elsewhere/<namespace> . copy in what proves itself; the rest is "Invalid argument", .kvfs/events says why
  rm <chunk>                     remove a chunk from RAM and NVMe
  rm -rf <namespace>/prefixes/X  remove a prefix and all that was built on it; `kvfs ls` prints X
  cat .kvfs/status.json          what goes on; .kvfs/metrics says it for Prometheus
  tail -f .kvfs/events           what happens; the log is bounded, old lines go
  cat .kvfs/config.toml          the settings in force

A namespace is one model, dtype, layout and rank; namespace.json says which. It stays when its last chunk goes;
rm -rf <namespace> takes it too, unless an engine uses it.
Both names of a chunk are one file: removing either removes both. A chunk that is open is kept until it is closed.
Engines store through the socket that .kvfs/session points to; people copy in chunks, and nothing else.
Chunks hold users' prompts in another form. Treat copies accordingly.
"""


class ControlFiles:
    """Contents of the fixed files.

    The events, the settings and constant files have a size before they are opened; the others show 0, like those of /proc.

    Attributes:
        socket_path: what `.kvfs/session` points to.
        num_sessions: asks how many clients are connected.
    """

    def __init__(self, store: Store, mountpoint: str, socket_path: str) -> None:
        self.socket_path = socket_path
        self.num_sessions: Callable[[], int] = lambda: 0
        self._store = store
        self._mountpoint = mountpoint
        self._started_s = store.system.monotonic()
        self._made = {
            Role.STATUS: self._status,
            Role.METRICS: store.metrics_text,
            Role.CONFIG: self._config,
        }

    def constant(self, node: Fixed) -> bytes | None:
        """The content of a file that never changes, else None."""
        if node.role is Role.NAMESPACE_JSON and node.table is not None:
            return namespace.encode(node.table.namespace)
        return README.encode() if node.role is Role.README else None

    def size(self, node: Fixed) -> int:
        """What `stat` says of a fixed file or link."""
        if node.role is Role.EVENTS:
            return self._store.events.size
        if node.role is Role.SESSION:
            return len(os.fsencode(self.socket_path))
        if node.role is Role.CONFIG:
            return len(self._config())
        return len(self.constant(node) or b"")

    def snapshot(self, node: Fixed) -> bytes:
        """The content of a file that is made when it is opened."""
        return self._made[node.role]()

    def read_events(self, offset: int, size: int) -> bytes:
        """A piece of the event log; empty at its end."""
        return self._store.events.read(offset, size)

    def _config(self) -> bytes:
        in_force = msgspec.structs.replace(self._store.settings, policy=self._store.policy.name)
        return config.to_toml(in_force).encode()

    def _status(self) -> bytes:
        document = {
            "version": kvfs.__version__,
            "pid": os.getpid(),
            "mountpoint": self._mountpoint,
            "uptime_s": round(self._store.system.monotonic() - self._started_s, 3),
            "num_sessions": self.num_sessions(),
            **msgspec.to_builtins(self._store.statistics()),
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
