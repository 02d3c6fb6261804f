"""The session protocol: what an adapter and the daemon say to each other.

One message is one packet of an ``AF_UNIX`` ``SOCK_SEQPACKET`` socket: msgpack, at most `MAX_MESSAGE_BYTES`. A client
sends requests; each carries an `id` of the client's choosing, and each gets exactly one reply with the same `id`
(`Failure` where it cannot be met). A `Load` whose reply says that bytes are still arriving is followed by `Arrived`
messages with its `id`, the last of which has `num_layers` equal to the namespace's. Replies may overtake one another.
Every request takes a batch of at most `MAX_BATCH` keys.

Never change a field here without raising `VERSION`: a peer of another version gets a `Failure` that names both.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from kvfs.errors import ProtocolError

VERSION = 5
"""2: a chunk may be published without checksums; `Arrived` names the chunks that are ahead. 3: `Matched` names tiers;
`Prefetch` and `Cancel`. 4: several volumes; `Why`, `Declined`, `Listen`, `Warm`. 5: `Hint`; a `Load` may leave chunks on the
volume, and `Placement` says which are proven."""

MAX_MESSAGE_BYTES = 160 * 1024
MAX_BATCH = 4096
MAX_VOLUMES = 16
MAX_QUESTIONS = 1024

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Keys = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_BATCH)]
"""Keys of 16 bytes each, one after the other."""


class Warmth(IntEnum):
    """What became of a chunk that was to be brought into RAM. Never change these values."""

    GONE = 0
    """It is not stored (any more)."""
    THERE = 1
    """It was in RAM already."""
    BROUGHT = 2
    OVER_SHARE = 3
    """What is warm and was not loaded yet takes as much of RAM as it may."""
    NO_ROOM = 4
    """RAM is full of what is in use, dirty, or was brought for somebody who waits."""
    UNREADABLE = 5


class Tier(IntEnum):
    """Where the bytes of a chunk are."""

    NONE = 0
    RAM = 1
    NVME = 2


class StoreStatus(IntEnum):
    """What became of one chunk of a `Store` or a `Publish`.

    STORED: the slot is reserved (Store), the chunk is visible (Publish). EXISTS: somebody stored it already. REFUSED:
    there is no room now; recompute next time. BAD: the bytes in the slot do not have the checksums that were sent.
    UNKNOWN: a `Publish` of what was never reserved.
    """

    STORED = 0
    EXISTS = 1
    REFUSED = 2
    BAD = 3
    UNKNOWN = 4


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all messages."""


class Request(Message, frozen=True):
    """What a client sends."""

    id: Id


class Reply(Message, frozen=True):
    """What the daemon sends."""

    id: Id


# requests


class Hello(Request, frozen=True, tag="hello"):
    """First message of a connection. `namespace` is the content of a `namespace.json`."""

    version: int
    namespace: Annotated[bytes, msgspec.Meta(max_length=128 * 1024)]
    client: Annotated[str, msgspec.Meta(max_length=200)]


class OpenWindow(Request, frozen=True, tag="window"):
    """Ask for the session's window, the memory in which chunks to be stored are handed over. Once a connection."""

    size_bytes: Size


class Match(Request, frozen=True, tag="match"):
    """How long a prefix of `keys` is stored? What is found is leased until `Release` or the connection ends.

    `is_again`: the same request of an engine was matched before; it is one request to whoever listens.
    """

    keys: Keys
    is_again: bool = False


class Load(Request, frozen=True, tag="load"):
    """Where do the bytes of `keys` lie? They are leased, and counted as a hit.

    Chunks on NVMe are brought into RAM first. With `stream` the reply comes at once and `Arrived` follows as layers
    become readable, else the reply comes when all is there or `deadline_ms` has passed. With `stay_on_volume` the client
    reads from the volume itself what is there only, and is not on its way into RAM for somebody else already.
    """

    keys: Keys
    deadline_ms: Size
    stream: bool = False
    stay_on_volume: bool = False


class Prefetch(Request, frozen=True, tag="prefetch"):
    """A load of `keys` is likely: bring those of them that are on NVMe into RAM, the first of them first.

    It is answered at once. Nothing is leased by it, nothing counts as a hit. Of all prefetches those of the highest
    `priority` go first, then the oldest. It ends with `Cancel`, with the session, or when `deadline_ms` has passed.
    """

    keys: Keys
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]
    deadline_ms: Size


class Warm(Request, frozen=True, tag="warm"):
    """The operator wants `keys` in RAM. The reply comes when each is there, or cannot be; nothing counts as a hit."""

    keys: Keys


class Cancel(Request, frozen=True, tag="cancel"):
    """Give up what the `Prefetch` with the id `prefetch` has not begun yet."""

    prefetch: Id


class Release(Request, frozen=True, tag="release"):
    """End a lease that `Match` or `Load` gave."""

    lease: Size


class NewChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk that a client wants to store: its chain value (32 bytes), its parent's key (16), …"""

    chain: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    parent: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    position: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Store(Request, frozen=True, tag="store"):
    """Reserve room for chunks. The reply names a slot in the window for each that is welcome."""

    chunks: Annotated[tuple[NewChunk, ...], msgspec.Meta(max_length=MAX_BATCH)]


class Finished(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk whose payload lies in its slot, with the xxh3_64 of each layer, big-endian, one after the other.

    Without checksums the daemon takes those of the bytes that it finds.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    checksums: Annotated[bytes, msgspec.Meta(max_length=8 * 1024)]


class Publish(Request, frozen=True, tag="publish"):
    """Make chunks visible. The daemon copies and verifies them; the slots are free when the reply comes."""

    chunks: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MAX_BATCH)]


class Abort(Request, frozen=True, tag="abort"):
    """Give reserved slots back."""

    keys: Keys


class Suspect(Request, frozen=True, tag="suspect"):
    """The client read wrong bytes: the daemon looks for itself and drops what is proven bad."""

    keys: Keys


class Declined(Request, frozen=True, tag="declined"):
    """The engine computes what it could load of `keys`: that is cheaper. Remembered for `Why`, bounded, and nothing else."""

    keys: Keys


class Hint(Request, frozen=True, tag="hint"):
    """What the engine knows of a chain, or of its end from the first of `keys` on; see `kvfs.hints`.

    It counts for the longest prefix of `keys` that is stored. What is None stays as it was; an `expect_ms` of 0 takes back
    that a use is expected, a `closed` of False that the chain is not used again.
    """

    keys: Keys
    class_: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    expect_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] | None = None
    closed: bool | None = None


class Why(Request, frozen=True, tag="why"):
    """What is known of `keys` in the namespace `directory`? No `Hello` need come before it; nothing counts as a use.

    At most `MAX_QUESTIONS` keys: what is known of one takes more room than the key.
    """

    version: int
    directory: Annotated[str, msgspec.Meta(max_length=255)]
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * MAX_QUESTIONS)]


class Listen(Request, frozen=True, tag="listen"):
    """The requests of all engines since the last time; the first time begins it. No `Hello` need come before it."""

    version: int


# replies


class Welcome(Reply, frozen=True, tag="welcome"):
    """Answer to `Hello`; carries the descriptor of the arena and those of `num_volumes` volumes (read-only).

    `arena_bytes` are mapped by the client at offset 0. `max_window_bytes` bounds what `OpenWindow` may ask for. A client
    that `is_trusted` gets the arena writable and no window: the offsets of its slots count from the arena's start.
    """

    version: int
    directory: str
    arena_bytes: Size
    max_window_bytes: Size
    num_volumes: Annotated[int, msgspec.Meta(ge=0, le=MAX_VOLUMES)]
    is_trusted: bool


class Window(Reply, frozen=True, tag="window_reply"):
    """Answer to `OpenWindow`; carries the descriptor of the window."""

    size_bytes: Size


class Matched(Reply, frozen=True, tag="matched"):
    """`count` keys from the first on are stored; `lease` holds them (0 where there is nothing to hold).

    `tiers` has a byte for each of them, its `Tier` now.
    """

    count: int
    lease: Size
    tiers: bytes


class Placement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one chunk lies: a whole file, header first, at `offset` of the arena (RAM) or of a volume (NVME).

    `volume` counts from 0, in the order of the descriptors in `Welcome`. `tier` NONE is a miss. `source` says where the
    chunk was when the load was asked for. On a volume `is_proven` says that the daemon has written or verified the extent
    since it started; of others the client has to look at every byte.
    """

    tier: Tier
    source: Tier
    offset: Size
    length: Size
    volume: Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOLUMES)] = 0
    is_proven: bool = False


class Loaded(Reply, frozen=True, tag="loaded"):
    """Answer to `Load`: a placement for each key; layers below `num_layers` are readable."""

    placements: tuple[Placement, ...]
    lease: Size
    num_layers: int


class Arrived(Reply, frozen=True, tag="arrived"):
    """Layers below `num_layers` of all chunks are readable now, but for the chunks (by index) in `failed`.

    `ahead` has (index, layers) for chunks of which more came since the last message: their layers below `layers`.
    """

    num_layers: int
    failed: tuple[int, ...]
    ahead: tuple[tuple[int, int], ...]


class Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where in the window the payload of one chunk goes, if `status` is STORED."""

    status: StoreStatus
    offset: Size


class Slots(Reply, frozen=True, tag="slots"):
    """Answer to `Store`, one slot for each chunk."""

    slots: tuple[Slot, ...]


class Published(Reply, frozen=True, tag="published"):
    """Answer to `Publish`, one status for each chunk."""

    statuses: tuple[StoreStatus, ...]


class Known(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is known of one key. Times are nanoseconds since the epoch, 0 where there is none.

    `tier` is not NONE for a stored chunk; then `since_ns` is when it was stored, `used_ns` its last use, and `missing` the
    nearest key before it in its chain that is not stored, empty if all is there. Of one that is not stored, `since_ns` is when it
    went, `why` and `cause` the reason (see `kvfs.ghosts.Ghost`), "" if nothing is remembered, `full` and `unused_s` the pressure.
    `hits` are the loads so far. `refusal` is why something was last not done with it, at `refused_ns`, so many `times`.
    """

    tier: Tier
    position: int = 0
    since_ns: int = 0
    used_ns: int = 0
    hits: int = 0
    missing: bytes = b""
    why: str = ""
    cause: str = ""
    full: int = 0
    unused_s: float = 0.0
    refusal: str = ""
    refused_ns: int = 0
    times: int = 0


class Explained(Reply, frozen=True, tag="explained"):
    """Answer to `Why`: one fact for each key, and since when what is remembered is whole.

    `started_ns` is when the daemon started; `whole_since_ns` may lie before it. `is_namespace` says whether the
    namespace is there; `policy` is the one that evicts.
    """

    facts: tuple[Known, ...]
    started_ns: int
    whole_since_ns: int
    refusals_since_ns: int
    policy: str
    is_namespace: bool


class Heard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One prefix that the engine of a `session` asked for, in the namespace `directory`, and how much of it was stored."""

    time_ns: int
    session: int
    directory: str
    tokens_per_chunk: int
    num_found: int
    keys: Keys


class Overheard(Reply, frozen=True, tag="overheard"):
    """Answer to `Listen`: the requests in order. `num_lost` came too fast for whoever listens, or did not fit."""

    requests: tuple[Heard, ...]
    num_lost: int
    is_more: bool


class Warmed(Reply, frozen=True, tag="warmed"):
    """Answer to `Warm`: a `Warmth` for each key."""

    found: Annotated[bytes, msgspec.Meta(max_length=MAX_BATCH)]


class Done(Reply, frozen=True, tag="done"):
    """Answer to requests that have nothing to tell."""


class Failure(Reply, frozen=True, tag="failure"):
    """The request was not met; `message` is one sentence for a person."""

    message: str


AnyRequest = (
    Hello
    | OpenWindow
    | Match
    | Load
    | Prefetch
    | Cancel
    | Warm
    | Release
    | Store
    | Publish
    | Abort
    | Suspect
    | Declined
    | Hint
    | Why
    | Listen
)
AnyReply = (
    Welcome | Window | Matched | Loaded | Arrived | Warmed | Slots | Published | Explained | Overheard | Done | Failure
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)
R = TypeVar("R", bound=Reply)


def encode(message: Message) -> bytes:
    """One packet; raises ProtocolError if it is too large."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(packet)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return packet


def decode_request(packet: bytes) -> AnyRequest:
    """The request in a packet; raises ProtocolError for anything else."""
    return _decode(_request_decoder, packet)


def decode_reply(packet: bytes) -> AnyReply:
    """The reply in a packet; raises ProtocolError for anything else."""
    return _decode(_reply_decoder, packet)


Decoded = TypeVar("Decoded")


def _decode(decoder: msgspec.msgpack.Decoder[Decoded], packet: bytes) -> Decoded:
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message exceeds {MAX_MESSAGE_BYTES} bytes")
    try:
        return decoder.decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
