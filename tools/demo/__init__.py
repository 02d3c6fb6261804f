"""`make demo`: one long prompt, cold, warm, after a restart and after its eviction, on a real mount and a real model.

`python -m kvfs.tools.demo` prepares the model (`model`), mounts kvfs in a directory of its own (`mounting`), gives the
prompt (`prompt`) to processes of their own (`worker`), and shows what they measured (`report`).
"""
