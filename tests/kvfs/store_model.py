"""What the state machine of the store knows: which chunks there can be, and what of them there is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs import keys
from kvfs.catalog import Chunk
from kvfs.chunk import Facts, Geometry, build_header, geometry
from kvfs.intake import Reservation
from kvfs.keys import ChainHash, Key, KeyChain
from kvfs.messages import NewChunk
from kvfs.namespace import Namespace
from kvfs.promotion import Promotion
from kvfs.testing import checksums_of, payload_of, sized_namespace

NAMESPACES = (sized_namespace(512 << 10, "tests/large"), sized_namespace(200 << 10, "tests/small"))


class Node:
    """A chunk that may be stored: its name is the path of its full chunks, and the tokens of a short one behind them.

    No dataclass: hypothesis would print its payload.
    """

    def __init__(self, name: str, namespace: int, new: NewChunk, geo: Geometry, path: Sequence[Key]) -> None:
        self.name = name
        self.namespace = namespace
        self.new = new
        self.key = keys.key_of(ChainHash(new.chain))
        self.geo = geo
        self.payload = payload_of(ChainHash(new.chain), geo)
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.name} of {self.namespace}>"

    def file(self, created_ns: int) -> bytes:
        """The whole file, if it was published then."""
        new, sums = self.new, checksums_of(self.payload, self.geo)
        facts = Facts(ChainHash(new.chain), Key(new.parent), new.position, new.num_tokens, created_ns, sums)
        return build_header(self.geo, facts) + self.payload + bytes(self.geo.pad_bytes)


def node_of(number: int, namespace: Namespace, full: str, num_short: int) -> Node:
    step = namespace.identity.tokens_per_chunk
    tokens = array("I", [ord(letter) for letter in full for _ in range(step)] + [0] * num_short)
    chain = KeyChain(keys.root(namespace.identity.fingerprint()), step, tokens)
    value = chain.short_chain(num_short) if num_short else chain.chains[-1]
    position = len(full) - (not num_short)
    new = NewChunk(value, keys.key_of(chain.parent_of(position)), position, num_short or step)
    geo = geometry(namespace, new.num_tokens)
    path = list(dict.fromkeys([*chain.keys, keys.key_of(value)]))
    return Node(f"{full}+{num_short}", number, new, geo, path)


NODES = [
    node_of(number, namespace, full, num_short)
    for number, namespace in enumerate(NAMESPACES)
    for full, num_short in [
        ("a", 0), ("ab", 0), ("abc", 0), ("abcd", 0), ("abX", 0), ("abXY", 0), ("aZ", 0), ("Q", 0), ("QR", 0),
        ("a", 3), ("abcd", 5), ("abcd", 9),
    ]
]  # fmt: skip
NODE_AT = {(node.namespace, node.key): node for node in NODES}
QUOTAS = (None, None, None, 300 << 10, 1 << 20, 2 << 20)


@dataclass(eq=False)
class Hold:
    """A lease that the model holds, the bytes that were read under it, and whether its chunk was removed since."""

    node: Node
    chunk: Chunk
    expected: bytes
    view: memoryview | None = None
    was_removed: bool = False


@dataclass
class Model:
    """What the test knows of one run of the store.

    Attributes: visible; pinned; quotas and bytes of the namespaces, by number; known: every chunk that was ever visible; evicted: those whose eviction may not be durable yet;
    reservations, holds: what the test has to give back; promotions: those that had not ended when last looked at.
    """

    visible: set[Node] = field(default_factory=set)
    pinned: set[Node] = field(default_factory=set)
    quotas: list[int | None] = field(default_factory=lambda: [None] * len(NAMESPACES))
    num_bytes: list[int] = field(default_factory=lambda: [0] * len(NAMESPACES))
    is_expiring: bool = False
    known: set[Chunk] = field(default_factory=set)
    evicted: set[Node] = field(default_factory=set)
    reservations: list[tuple[Node, Reservation]] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    promotions: list[Promotion] = field(default_factory=list)
    num_event_bytes: int = 0
    had_read_error: bool = False  # what joins a read that failed hears of it later
    num_evictions: int = 0
    num_steps: int = 0
    was_degraded: bool = False

    @property
    def held(self) -> set[Node]:
        """What is pinned, and what of its chain is stored without a gap."""
        held = set()
        for node in self.pinned:
            above: Node | None = node
            while above in self.visible:
                held.add(above)
                above = NODE_AT.get((above.namespace, Key(above.new.parent)))
        return held
