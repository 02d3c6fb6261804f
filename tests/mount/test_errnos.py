"""The one table of errnos."""

from __future__ import annotations

import errno
import logging

import pytest
import trio

from kvfs import errors
from kvfs.metrics import Counters
from kvfs.mount.errnos import TABLE, Faults, Refused, errno_of


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (errors.CorruptChunk("x"), errno.EIO),
        (errors.UnavailableError("x"), errno.EIO),
        (errors.CapacityError("x"), errno.ENOSPC),
        (errors.ProtocolError("x"), errno.EPROTO),
        (errors.ConfigError("x"), errno.EINVAL),
        (errors.UsageError("x"), errno.EINVAL),
        (trio.TooSlowError(), errno.ETIMEDOUT),
        (Refused(errno.ENOTEMPTY), errno.ENOTEMPTY),
        (ValueError("x"), None),
        (OSError(errno.EMFILE, "x"), None),
    ],
)
def test_errno_of(error: Exception, number: int | None) -> None:
    assert errno_of(error) == number


def test_every_error_that_can_reach_the_mount_has_an_errno() -> None:
    """Those of adapters and commands end in an engine or on a terminal, wherever a test may have imported them."""
    waiting: list[type[errors.KvfsError]] = errors.KvfsError.__subclasses__()
    seen = set()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("kvfs.") and not kind.__module__.startswith(
            ("kvfs.engine_adapters", "kvfs.tools")
        ):
            seen.add(kind)
            assert issubclass(kind, (Refused, *(one for one, _ in TABLE))), kind
    assert {errors.CorruptChunk, errors.ProtocolError, Refused} <= seen


def test_a_subclass_is_not_hidden_by_its_base() -> None:
    for number, (kind, _) in enumerate(TABLE):
        assert not any(issubclass(kind, base) for base, _ in TABLE[:number])


@pytest.mark.expect_log("lookup failed")
def test_a_fault_is_counted_always_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    faults = Faults(counters)

    def fail(kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            raise kind("x")
        assert faults.errno_of("lookup", caught.value) == errno.EIO

    with caplog.at_level(logging.INFO):
        fail(ValueError)
        fail(ValueError)
        assert counters.mount_errors == 2
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert caplog.records[0].exc_info is not None
        fail(TypeError)
    assert len(caplog.records) == 2


def test_what_is_meant_to_happen_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    with caplog.at_level(logging.INFO):
        assert Faults(counters).errno_of("unlink", Refused(errno.EPERM)) == errno.EPERM
    assert counters.mount_errors == 0
    assert not caplog.records
