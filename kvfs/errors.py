"""What can go wrong, and whose fault it is.

    KvfsError
    ├── UsageError           the caller's or the operator's mistake; the message is one sentence for a person
    │   ├── ConfigError      a setting that is unknown, malformed or out of range
    │   └── ProtocolError    a session message that is malformed, oversized or of another version
    ├── FormatError          bytes that do not prove what they claim to be (chunk, superblock, index)
    │   └── CorruptChunk     a chunk whose header or layer checksum is wrong: proven bad, may be dropped
    ├── CapacityError        no room now; nothing was lost, trying later may succeed
    └── UnavailableError     the daemon or a device did not answer in time; says nothing about the bytes
        └── DiskFullError    an index or a document found no room on its file system; it is tried again

Only `CorruptChunk` allows a chunk to be deleted. The errno for each class is chosen in `kvfs.mount.errnos`, the
exit code in `kvfs.tools.commands`.
"""


class KvfsError(Exception):
    """Base of all errors that kvfs raises on purpose."""


class UsageError(KvfsError):
    """The caller asked for something impossible; the message tells a person what to do."""


class ConfigError(UsageError):
    """A setting is unknown, malformed or out of range."""


class ProtocolError(UsageError):
    """A session message that the other side may not send."""


class FormatError(KvfsError):
    """Bytes that are not what they should be."""


class CorruptChunk(FormatError):
    """A chunk that is proven bad: its header or one of its checksums does not hold."""


class CapacityError(KvfsError):
    """There is no room now."""


class UnavailableError(KvfsError):
    """The daemon or a device gave no answer within the deadline."""


class DiskFullError(UnavailableError):
    """The file system of an index is full: what was asked for is in force, and durable once there is room."""
