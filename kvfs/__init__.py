"""kvfs: a file system for the KV cache of LLM inference engines.

The package itself is the store and its client: formats (`keys`, `namespace`, `chunk`, `messages`), the tiers and the
orchestrator (`store`), and `client` for whoever loads and stores chunks. It knows no FUSE and no engine. Above it lie
`kvfs.mount` (the FUSE face), `kvfs.engine_adapters` (one module for each engine) and `kvfs.tools` (the `kvfs` command);
their sources are the top-level folders of the repository, see ARCHITECTURE.md.

Importing this package imports nothing else, so it is cheap and needs neither torch nor numpy.
"""

__version__ = "0.1.0"
