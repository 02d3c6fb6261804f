"""The `kvfs` command, one module for each subcommand, and the scripts that set up a working copy.

Installed as `kvfs.tools`. Translates command lines into calls of `kvfs` and `kvfs.mount`, and errors into one sentence
and an exit code (see `commands`).
"""
