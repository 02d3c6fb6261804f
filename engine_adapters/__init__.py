"""Engine adapters: an engine's blocks into chunks and back, one module for each engine.

Installed as `kvfs.engine_adapters`. May import `kvfs`, never `kvfs.mount` or `kvfs.tools`. Each engine is imported in
its own module only, so that an adapter needs no engine but its own.
"""
