"""`kvfs format`: make a volume before it is first mounted, and write it whole if asked to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from kvfs.config import MAX_TIER_BYTES, MIN_TIER_BYTES, format_size, parse_size
from kvfs.errors import KvfsError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.index import Index
from kvfs.system import System
from kvfs.tools.offline import Bar
from kvfs.volume import FILE_NAME, SUPERBLOCK_BYTES, Volume, aligned_buffer

EXAMPLES = """
kvfs format /data/kvfs 64GiB

Makes a volume, as the first kvfs mount would. It takes no time: the room is reserved, and nothing is written.

kvfs format /data/kvfs 64GiB --fill

Writes all of it once. First writes to a file that was only reserved run at some 0.6 of the speed of later ones; this takes
that from the first stores. It wears the drive by as much as is written.
"""

_STEP_BYTES = 8 << 20
_THREADS = 4
_RATED_BYTES = 600 * 10**12  # written in the life of a common drive of 1 TB


def make_volume(
    directory: Annotated[str, typer.Argument(help="Directory for the volume; made, its parents are not.")],
    size: Annotated[str, typer.Argument(help="Size of the volume, such as 64GiB.")],
    fill: Annotated[bool, typer.Option("--fill", help="Write all of it once.")] = False,
) -> None:
    """Make a volume on NVMe."""
    place = Path(directory)
    size_bytes = parse_size(size)
    if not MIN_TIER_BYTES <= size_bytes <= MAX_TIER_BYTES:
        raise UsageError(
            f"a volume has {format_size(MIN_TIER_BYTES)} to {format_size(MAX_TIER_BYTES)}, not {format_size(size_bytes)}"
        )
    if (place / FILE_NAME).exists():
        raise UsageError(f"there is a volume in {place} already; `kvfs destroy {place}` removes it")
    logging.basicConfig(format="kvfs: %(message)s")
    is_made = not place.exists()
    try:
        with closing(Volume.open(place, size_bytes, System())) as volume:
            index = Index.open(place / INDEX, volume.identity)
            index.keep_unclaimed([])
            index.close()
            typer.echo(f"kvfs: made a volume of {format_size(volume.capacity)} in {place}")
            if fill:
                _fill(volume)
    except OSError as error:
        raise KvfsError(f"cannot write the volume in {place}: {error.strerror or error}") from error
    finally:
        if is_made:
            with suppress(OSError):  # it holds the volume, unless that was refused
                place.rmdir()


def _fill(volume: Volume) -> None:
    share = volume.capacity / _RATED_BYTES
    typer.echo(
        f"kvfs: writing {format_size(volume.capacity)} once wears the drive by that: {100 * share:.2g} % of the 600 TB that a "
        "common drive of 1 TB is rated for",
        err=True,
    )
    zeros = aligned_buffer(_STEP_BYTES)
    with Bar() as bar, ThreadPoolExecutor(_THREADS, "kvfs-fill") as pool:
        bar.begin("filling the volume", volume.capacity - SUPERBLOCK_BYTES)

        def write(piece: tuple[int, int]) -> int:
            offset, size = piece
            volume.write([zeros[:size]], offset)
            return size

        try:
            for size in pool.map(write, _pieces(volume.capacity)):
                bar.advance(size)
            volume.sync()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            typer.echo("kvfs: interrupted: the volume can be used, but was not filled to its end", err=True)
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    typer.echo(f"kvfs: filled {format_size(volume.capacity)}")


def _pieces(capacity: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each write."""
    for offset in range(SUPERBLOCK_BYTES, capacity, _STEP_BYTES):
        yield offset, min(_STEP_BYTES, capacity - offset)
