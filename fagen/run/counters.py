"""(device, stream) -> a word of device memory that is 0 whenever no kernel of that stream runs.

Kernels with `dynamic_tiles` draw their tiles from it and leave it at 0. What one stream runs comes
one after the other, so a word for each suffices. A launch that a CUDA graph captures gets a word
of its own, since the graph may run beside its stream; of one captured graph, instantiated twice,
the two must not run at the same time. No word is ever given back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from fagen.run import driver

WORD_BYTES = 32  # a sector of the L2
SLAB_BYTES = 32 << 10

_words: dict[tuple[int, int], int] = {}  # by device and the stream's id, which is never used again
_free: dict[int, Iterator[int]] = {}  # by device
_lock = threading.Lock()


def tile_counter(device_index: int, stream: int) -> int:
    """The address of the word for a launch on this stream, whose context is current.

    Raises:
        CudaError: if the driver refuses, or the device's memory is full.
    """
    if driver.is_capturing(stream):
        return _new_word(device_index)
    key = device_index, driver.stream_id(stream)
    return _words.get(key) or _words.setdefault(key, _new_word(device_index))


def _new_word(device_index: int) -> int:
    with _lock:
        word = next(_free.get(device_index, iter(())), None)
        if word is None:
            slab = driver.allocate_zeros(SLAB_BYTES)
            _free[device_index] = iter(range(slab, slab + SLAB_BYTES, WORD_BYTES))
            word = next(_free[device_index])
        return word
