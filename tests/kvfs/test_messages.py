"""The session protocol: every message survives the wire, and no packet raises anything but ProtocolError."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import messages as m
from kvfs.errors import ProtocolError

KEY, CHAIN = bytes(range(16)), bytes(range(32))
REQUESTS: list[m.AnyRequest] = [
    m.Hello(1, m.VERSION, b"{}", "engine"), m.OpenWindow(2, 64 << 20), m.Match(3, KEY * 3, True), m.Load(4, KEY, 1000, True),
    m.Release(5, 7), m.Store(6, (m.NewChunk(CHAIN, KEY, 0, 256),)), m.Publish(7, (m.Finished(KEY, bytes(240)),)),
    m.Abort(8, KEY), m.Suspect(9, KEY), m.Prefetch(10, KEY, 50, 60_000), m.Cancel(11, 10), m.Declined(12, KEY), m.Why(13, m.VERSION, "ns", KEY * 2), m.Listen(14, m.VERSION),
    m.Warm(15, KEY * 2), m.Hint(16, KEY * 2, 255, 60_000, False), m.Hint(17, KEY),
]  # fmt: skip
REPLIES: list[m.AnyReply] = [
    m.Welcome(1, m.VERSION, "ns", 1 << 32, 1 << 26, 2, False), m.Window(2, 4096), m.Matched(3, 2, 9, bytes([1, 2])),
    m.Loaded(4, (m.Placement(m.Tier.RAM, m.Tier.NVME, 4096, 8192, 3),), 9, 30), m.Arrived(4, 30, (1, 5), ((2, 31),)),
    m.Slots(5, (m.Slot(m.StoreStatus.REFUSED, 0),)), m.Published(6, (m.StoreStatus.BAD,)), m.Done(7),
    m.Failure(0, "no"), m.Overheard(8, (m.Heard(9**19, 3, "ns", 256, 1, KEY * 2),), 2, True),
    m.Explained(9, (m.Known(m.Tier.NONE, 0, 5, 0, 3, b"", "evict", "policy", 99, 61.5, "quota", 6, 2),), 1, 2, 3, "lru", True),
    m.Warmed(8, bytes([m.Warmth.BROUGHT, m.Warmth.NO_ROOM])),
]  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_survive_the_wire(request_: m.AnyRequest) -> None:
    assert m.decode_request(m.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_survive_the_wire(reply: m.AnyReply) -> None:
    assert m.decode_reply(m.encode(reply)) == reply


def test_every_message_is_tried() -> None:
    assert {type(message) for message in REQUESTS} == set(typing.get_args(m.AnyRequest))
    assert {type(message) for message in REPLIES} == set(typing.get_args(m.AnyReply))


def test_golden_packet() -> None:
    """The wire form: a msgpack array that begins with the tag and the id."""
    assert m.VERSION == 5
    assert m.encode(m.Match(3, b"k" * 16)).hex() == "94a56d6174636803c410" + (b"k" * 16).hex() + "c2"
    assert m.encode(m.Load(4, b"", 1000, True)).hex() == "96a46c6f616404c400cd03e8c3c2"


@given(st.binary(max_size=300))
def test_any_bytes(packet: bytes) -> None:
    """Bytes that are no message are a ProtocolError, in both directions."""
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(packet)
        except ProtocolError:
            pass


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_damaged_messages(message: m.Message, data: st.DataObject) -> None:
    """A message with some of its fields replaced by anything decodes, or is a ProtocolError."""
    fields = msgspec.msgpack.decode(m.encode(message))
    for index in data.draw(st.lists(st.integers(0, len(fields) - 1), min_size=1, max_size=3)):
        fields[index] = data.draw(values)
    packet = msgspec.msgpack.encode(fields[: data.draw(st.integers(0, len(fields)))])
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(packet)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "packet",
    [
        b"", b"\x90", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000,
        b"\x81" * 100_000, m.encode(REQUESTS[2]) + b"\0", m.encode(REQUESTS[2])[:-1], b"\0" * (m.MAX_MESSAGE_BYTES + 1),
        msgspec.msgpack.encode(["match", -1, b""]), msgspec.msgpack.encode(["match", 1 << 32, b""]),
        msgspec.msgpack.encode(["match", 1, bytes(16 * m.MAX_BATCH + 1)]), msgspec.msgpack.encode(["nonsense", 1]),
        msgspec.msgpack.encode(["load", 1, b"", 1 << 62, False]), msgspec.msgpack.encode(["match", 1, b"", b""]),
        msgspec.msgpack.encode(["store", 1, [[CHAIN[1:], KEY, 0, 1]]]), msgspec.msgpack.encode(["hello", 1, 1, b"", "\0" * 201]),
        msgspec.msgpack.encode(["store", 1, [[CHAIN, KEY, 0, 0]]]), msgspec.msgpack.encode(["match", 1.0, b""]),
    ],
    ids=lambda packet: repr(packet[:12]),
)  # fmt: skip
def test_hostile_packets(packet: bytes) -> None:
    """Malformed, oversized, nested and out-of-range messages are refused before they cost anything."""
    with pytest.raises(ProtocolError):
        m.decode_request(packet)


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        m.encode(m.Failure(0, "x" * m.MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("reply", [
    m.Loaded(2**32 - 1, tuple(m.Placement(m.Tier.RAM, m.Tier.NVME, 2**62 - 1, 2**30, 15) for _ in range(m.MAX_BATCH)), 2**62 - 1, 1024),
    m.Arrived(2**32 - 1, 1024, tuple(range(m.MAX_BATCH)), tuple((i, 1024) for i in range(m.MAX_BATCH))),
    m.Slots(1, tuple(m.Slot(m.StoreStatus.STORED, 2**62 - 1) for _ in range(m.MAX_BATCH))),
], ids=lambda reply: type(reply).__name__)  # fmt: skip
def test_the_largest_replies_fit(reply: m.AnyReply) -> None:
    """A full batch always has an answer that fits one packet."""
    assert m.decode_reply(m.encode(reply)) == reply


def test_the_largest_requests_fit() -> None:
    """4,096 keys fit one packet."""
    assert len(m.encode(m.Load(2**32 - 1, bytes(16 * m.MAX_BATCH), 2**62 - 1, True))) < m.MAX_MESSAGE_BYTES
