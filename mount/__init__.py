"""The FUSE face of kvfs: the tree as it is seen, the session socket, and the daemon that holds both.

Installed as `kvfs.mount`. May import `kvfs`, never `kvfs.engine_adapters` or `kvfs.tools`. pyfuse3 is imported in
`operations` and `daemon` only.
"""
