"""A connection to a daemon, as a client has it: the socket, the mapped arena, the window.

Concurrency: a lock lets one thread ask at a time; who does not get it by its deadline goes without an answer. A request
that gets no answer in time breaks the connection, since nobody could tell its late reply from another's; whoever holds
the connection then attaches anew. Its socket stays open, unused, until the last load of it is closed: while it is open
the daemon keeps the leases, and with them the bytes that an engine may be copying at this moment.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.arena import MADV_POPULATE_READ, MADV_POPULATE_WRITE
from kvfs.errors import KvfsError, ProtocolError, UnavailableError, UsageError
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)

R = TypeVar("R", bound=m.Reply)
SESSION_LINK = Path(".kvfs") / "session"
_MAX_FDS = 1 + m.MAX_VOLUMES
_MAX_IGNORED = 64


def find_socket(mount: Path, deadline_s: float) -> str:
    """Where the daemon of this mount listens.

    Reads a link through FUSE, so it runs in a thread that is left behind if the daemon is stopped: one for each mount,
    however often it is asked, and another if something else was mounted there meanwhile. Raises UnavailableError.
    """
    with _questions_lock:
        question = _questions.get(mount)
        if question is None or not question.is_alive() or question.mounts != _mounts_above(mount):
            question = _questions[mount] = _Question(mount)
            question.start()
    question.join(deadline_s)
    if question.answer is None:
        raise UnavailableError(f"the mount {mount} did not answer within {deadline_s:g} s")
    if isinstance(question.answer, OSError):
        raise UnavailableError(f"no kvfs is mounted at {mount} ({question.answer.strerror})")
    return question.answer


def _mounts_above(path: Path) -> frozenset[bytes]:
    """The numbers of the mounts on the way to a path, without touching them; proc_pid_mountinfo(5)."""
    wanted = os.fsencode(os.path.abspath(path)) + b"/"
    found = set()
    try:
        with open("/proc/self/mountinfo", "rb") as lines:
            for line in lines:
                number, _, _, _, point = line.split(b" ", 5)[:5]
                point = re.sub(rb"\\(\d{3})", lambda escaped: bytes([int(escaped[1], 8)]), point)
                if wanted.startswith(point.rstrip(b"/") + b"/"):
                    found.add(number)
    except OSError:
        return frozenset()
    return frozenset(found)


class _Question(threading.Thread):
    """Reads a mount's link. Attributes: answer: None until there is one; mounts: see `_mounts_above`."""

    def __init__(self, mount: Path) -> None:
        super().__init__(name="kvfs-attach", daemon=True)
        self.answer: str | OSError | None = None
        self.mounts = _mounts_above(mount)
        self._mount = mount

    def run(self) -> None:
        try:
            self.answer = os.readlink(self._mount / SESSION_LINK)
        except OSError as error:
            self.answer = error


_questions: dict[Path, _Question] = {}
_questions_lock = threading.Lock()


def _forget_questions() -> None:
    """The threads of a parent are not in its child, and its lock may be held for ever."""
    global _questions_lock  # noqa: PLW0603 - a lock cannot be made anew in place
    _questions_lock = threading.Lock()
    _questions.clear()


os.register_at_fork(after_in_child=_forget_questions)


class Connection:
    """An open session.

    Attributes: arena: the mapped arena, read-only; volume_fds; welcome; is_broken: nothing can be asked any more;
    is_closed: nothing can be read either.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._maps: list[mmap.mmap] = []
        self._window: memoryview | None = None
        self.arena = memoryview(b"")
        self.volume_fds: list[int] = []
        self.welcome: m.Welcome | None = None
        self.is_broken = False
        self.is_closed = False
        self._num_holds = 0
        self._holding = threading.Lock()
        self._early: dict[int, deque[m.AnyReply]] = {}  # replies that came while another was awaited
        self._awaited: set[int] = set()  # requests whose reply will be asked for later
        self._ignored: set[int] = set()  # requests whose reply will be dropped

    @classmethod
    def open(cls, path: str, namespace: Namespace, name: str, deadline_s: float) -> Connection:
        """Connect, say hello and map the arena. Raises UnavailableError, or UsageError if the daemon refuses."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection = cls(sock)
        try:
            sock.settimeout(deadline_s)
            sock.connect(path)
            hello = m.Hello(connection.next_id(), m.VERSION, namespaces.encode(namespace), name[:200])
            welcome, fds = connection._ask_for_fds(hello, m.Welcome, deadline_s)
            connection._take(welcome, fds)
        except OSError as error:
            connection.close()
            raise UnavailableError(f"no daemon at {path}: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def look(cls, path: str, deadline_s: float) -> Connection:
        """Connect without a namespace, to ask what needs none (`Why`, `Listen`). Raises UnavailableError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(deadline_s)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise UnavailableError(f"no daemon at {path}: {error.strerror or error}") from error
        return cls(sock)

    def _take(self, welcome: m.Welcome, fds: list[int]) -> None:
        self.welcome = welcome
        self.volume_fds = fds[1 : 1 + welcome.num_volumes]
        writable = mmap.PROT_WRITE if welcome.is_trusted else 0
        arena = mmap.mmap(fds[0], welcome.arena_bytes, prot=mmap.PROT_READ | writable)
        os.close(fds[0])
        self._maps.append(arena)
        with contextlib.suppress(OSError):  # before Linux 5.14 the first touch of each page is slower, that is all
            arena.madvise(MADV_POPULATE_READ)
        arena.madvise(mmap.MADV_DONTFORK)
        self.arena = memoryview(arena)

    @property
    def max_in_flight_bytes(self) -> int:
        """Payload that may be reserved and not published at once."""
        return self.welcome.max_window_bytes if self.welcome is not None else 0

    def next_id(self) -> int:
        """An id for a request."""
        return next(self._ids) & 0xFFFFFFFF

    def has_ended(self) -> bool:
        """Whether nothing can be asked any more: it broke, or the daemon has closed it since the last answer."""
        if not self.is_broken and self.is_hung_up():
            self.give_up()
        return self.is_broken

    def is_hung_up(self) -> bool:
        """Whether the daemon has closed it, or is gone, so that no lease is worth anything. One that broke here is not."""
        looking = select.poll()
        try:
            looking.register(self._socket, select.POLLRDHUP)
        except ValueError:  # closed by another thread at this moment
            return True
        return bool(looking.poll(0))

    # talking

    def ask(self, request: m.Request, kind: type[R], deadline_s: float) -> R:
        """Send a request and wait for its reply. Raises UnavailableError, or UsageError if it was refused."""
        return self._ask_for_fds(request, kind, deadline_s)[0]

    def post(self, request: m.Request) -> None:
        """Send a request whose reply says nothing; a broken connection has given back everything anyway."""
        with contextlib.suppress(UnavailableError, UsageError):
            self.ask(request, m.Done, 1.0)

    def tell(self, request: m.Request) -> None:
        """Send a request without waiting: its reply, which says nothing, is dropped when it comes.

        (After a pause it takes the daemon 0.4 ms to wake up and answer, 5 % of the load that ended.)
        """
        with contextlib.suppress(UnavailableError, UsageError):
            deadline = time.monotonic() + 1.0
            with self.turn(deadline):
                if len(self._ignored) >= _MAX_IGNORED:  # else they would fill the socket
                    oldest = min(self._ignored)
                    self._ignored.discard(oldest)
                    self._receive(oldest, m.Done, deadline)
                self._send(request, 1.0)
                self._ignored.add(request.id)

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Hold the lock. Raises UnavailableError if another thread's request has it until the deadline."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise UnavailableError("an earlier request has not been answered yet")
        try:
            yield
        finally:
            if self.is_closed:
                self._socket.close()  # which nobody else may do while this thread waits for a reply
            self._lock.release()

    def _send(self, request: m.Request, deadline_s: float) -> None:
        if self.is_broken:
            raise UnavailableError("the session has ended")
        packet = m.encode(request)
        try:
            self._socket.settimeout(max(deadline_s, 0.001))
            self._socket.send(packet)
        except OSError as error:
            raise self._broke(error) from error

    def receive(self, id_: int, kind: type[R], deadline: float) -> R:
        """The reply with this id; the caller has its `turn`. `deadline` is of the monotonic clock."""
        return self._receive(id_, kind, deadline)[0]

    def _ask_for_fds(self, request: m.Request, kind: type[R], deadline_s: float) -> tuple[R, list[int]]:
        deadline = time.monotonic() + deadline_s
        with self.turn(deadline):
            self._send(request, deadline_s)
            return self._receive(request.id, kind, deadline)

    def begin(self, request: m.Request, deadline_s: float) -> None:
        """Send a request whose reply is taken with `finish`, after others perhaps. Raises UnavailableError."""
        with self.turn(time.monotonic() + deadline_s):
            self._send(request, deadline_s)
            self._awaited.add(request.id)

    def finish(self, id_: int, kind: type[R], deadline_s: float) -> R:
        """The reply to a request that `begin` sent. Raises UnavailableError, or UsageError if it was refused."""
        deadline = time.monotonic() + deadline_s
        try:
            with self.turn(deadline):
                return self.receive(id_, kind, deadline)
        finally:
            self._awaited.discard(id_)

    def is_behind(self) -> bool:
        """Whether the daemon has yet to answer something that `begin` sent; takes in the answers that have come."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            while not self.is_broken and not self._awaited <= self._early.keys():
                self._socket.settimeout(0)
                try:
                    packet = self._socket.recv(m.MAX_MESSAGE_BYTES + 1)
                except BlockingIOError:
                    return True
                if not packet:
                    self.give_up()
                    return False
                self._keep(self._decode(packet))
            return False
        except (OSError, KvfsError):
            self.give_up()
            return False
        finally:
            self._lock.release()

    def _keep(self, answer: m.AnyReply) -> None:
        """An answer that nobody waits for at the moment."""
        if answer.id in self._ignored:
            self._ignored.discard(answer.id)
        elif isinstance(answer, m.Arrived) or answer.id in self._awaited:
            self._early.setdefault(answer.id, deque()).append(answer)
        else:
            self.give_up()
            raise ProtocolError(f"the daemon sent {type(answer).__name__}, for which nobody had asked")

    def _receive(self, id_: int, kind: type[R], deadline: float) -> tuple[R, list[int]]:
        fds: list[int] = []
        while True:
            answer = self._take_early(id_)
            if answer is None:
                if self.is_broken:
                    raise UnavailableError("the session has ended")
                packet, fds = self._receive_packet(deadline)
                answer = self._decode(packet)
                if answer.id in self._ignored:
                    self._ignored.discard(answer.id)
                    continue
            if isinstance(answer, m.Failure) and answer.id in (id_, 0):
                raise UsageError(answer.message)
            if answer.id == id_ and isinstance(answer, kind):
                return answer, fds
            if not isinstance(answer, m.Arrived) and answer.id not in self._awaited:
                self.give_up()
                raise ProtocolError(f"the daemon sent {type(answer).__name__} where {kind.__name__} was due")
            self._early.setdefault(answer.id, deque()).append(answer)

    def _take_early(self, id_: int) -> m.AnyReply | None:
        waiting = self._early.get(id_)
        if not waiting:
            return None
        answer = waiting.popleft()
        if not waiting:
            del self._early[id_]
        return answer

    def _decode(self, packet: bytes) -> m.AnyReply:
        try:
            return m.decode_reply(packet)
        except ProtocolError:
            self.give_up()
            raise

    def _receive_packet(self, deadline: float) -> tuple[bytes, list[int]]:
        left = deadline - time.monotonic()
        try:
            self._socket.settimeout(max(left, 0.001))
            packet, fds, _, _ = socket.recv_fds(
                self._socket, m.MAX_MESSAGE_BYTES + 1, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._broke(error) from error
        if not packet:
            raise self._broke(ConnectionResetError("the daemon closed the session"))
        return packet, fds

    def _broke(self, error: OSError) -> UnavailableError:
        self.give_up()
        if isinstance(error, TimeoutError):
            return UnavailableError("the daemon did not answer in time")
        return UnavailableError(f"the session broke: {error.strerror or error}")

    # memory

    @property
    def is_trusted(self) -> bool:
        """Whether what this client stores is written where it will stay."""
        return self.welcome is not None and self.welcome.is_trusted

    def window(self, size_bytes: int, deadline_s: float) -> memoryview:
        """What slots count from: the session's window, opened when first asked for, or the arena of a trusted one.

        Raises UnavailableError or UsageError.
        """
        if self.is_trusted:
            return self.arena
        assert self.welcome is not None
        with self.turn(time.monotonic() + deadline_s):
            if self._window is None:
                size_bytes = min(size_bytes, self.welcome.max_window_bytes)
                reply, fds = self._ask_for_fds(m.OpenWindow(self.next_id(), size_bytes), m.Window, deadline_s)
                window = mmap.mmap(fds[0], reply.size_bytes)
                os.close(fds[0])
                self._maps.append(window)
                with contextlib.suppress(OSError):
                    window.madvise(MADV_POPULATE_WRITE)
                window.madvise(mmap.MADV_DONTFORK)
                self._window = memoryview(window)
            return self._window

    def hold(self) -> bool:
        """A load begins to look at the arena; returns False if it is too late."""
        with self._holding:
            self._num_holds += not self.is_closed
            return not self.is_closed

    def let_go(self) -> None:
        """A load has ended; the last one of a broken session closes it."""
        with self._holding:
            self._num_holds -= 1
            is_last = self.is_broken and not self._num_holds
        if is_last:
            self.close()

    def give_up(self) -> None:
        """Ask nothing more; close now, or with the last load."""
        with self._holding:
            self.is_broken = True
            is_last = not self._num_holds
        if is_last:
            self.close()

    def close(self) -> None:
        """End the session. Memory that somebody still looks at is unmapped when they are done."""
        self.is_broken = self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

    def _end(self) -> None:
        """Close the socket, or leave that to the thread that waits for a reply; give back what is mapped."""
        if self._lock.acquire(blocking=False):
            self._socket.close()
            self._lock.release()
        self._unmap()

    def abandon(self) -> None:
        """Close this process's copies after a fork, without a word to the daemon."""
        self._lock, self._holding = threading.RLock(), threading.Lock()
        self.is_broken = self.is_closed = True
        self._end()

    def _unmap(self) -> None:
        fds, self.volume_fds = self.volume_fds, []
        for fd in fds:
            os.close(fd)
        for view in (self.arena, self._window):
            if view is not None:
                with contextlib.suppress(BufferError):
                    view.release()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps.clear()
        self.arena, self._window = memoryview(b""), None
