"""The memory of a process that computes on the CPU: compiled kernels of oneDNN, and freed blocks."""

import ctypes
import os
import platform


def limit_kernel_cache() -> None:
    """
    Caps oneDNN's cache of compiled kernels at 256 shapes, unless the environment says otherwise. By default, it and
    torch's layer above it keep 1024 each, of up to 1 MB, and text of many lengths has more shapes than that: with 256,
    hardly more are compiled again. Both read these variables before their first matrix product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")


def keep_freed_memory() -> None:
    """
    Tells glibc to reuse freed blocks instead of returning them to the kernel, which would have to zero the pages of
    every step's activations again. Does nothing without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # noqa: N806 (the C library's names)
        # Blocks of 4 MiB and more still go back: kept, they leave holes that the next ones do not fit into.
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 22)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """
    Returns freed blocks to the kernel. Small blocks that last, such as compiled kernels, lie between those of long
    texts, which glibc would keep: holes of many sizes, into which the next texts do not fit. Does nothing without
    glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
