"""A daemon for which 20 entries of a directory are many: `python short_listing_daemon.py mount …`."""

from __future__ import annotations

import sys

from kvfs.mount import listing
from kvfs.tools import cli

if __name__ == "__main__":
    listing.TOLD, listing.PROBES_FROM, listing.PROBE_EVERY = 20, 10, 5
    sys.exit(cli.main())
