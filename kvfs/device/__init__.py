"""Reading into an engine's memory, wherever that is: one reader, which looks at the *destination*.

    destination    way                                                            needs
    host memory    preadv, direct where it is aligned                             nothing
    CUDA memory    kvikio: GPUDirect Storage, or its own bounce buffers           CUDA and kvikio
    CUDA memory    a ring of pinned buffers: preadv and asynchronous copies       CUDA
    CUDA memory    straight from the arena, if it could be registered with CUDA   CUDA; what is in RAM already

A machine without a GPU never loads libcuda's functions nor kvikio: both are looked for when the first CUDA destination
comes, in the process that it lies in. (kvikio's transfers raise without libcuda even for host memory, and hang in a
child that was forked after its first use; cuInit before a fork breaks CUDA in the child.)

Nothing here knows torch: CUDA memory is whatever has ``__cuda_array_interface__``. A torch tensor is best handed over as
``tensor.view(torch.uint8)``, since the interface does not know every float. Of these modules `reader` is the interface;
`destination`, `host`, `kvikio_files` (the only one that imports kvikio), `ring`, `pinning`, `slab` and `driver` (CUDA's
driver through ctypes) are its parts.
"""
