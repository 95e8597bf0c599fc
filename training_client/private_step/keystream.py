"""Random words: AES-256 in counter mode, under a key that nothing else is drawn with.

`draw_key` has the operating system draw the key. The words have no state that a copy, a fork or a
checkpoint could use again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Array = np.ndarray[Any, Any]

KEY_BYTES: Final = 32
BLOCK: Final = 1 << 17  # words of one stream
_ZEROS: Final = bytes(8 * BLOCK)


def read_keystream(key: bytes, stream: int, size: int, out: bytearray | None = None) -> Array:
    """Return the first words of a stream, as integers of 64 bits.

    Args:
        key: 32 random bytes.
        stream: below 2⁶⁴, the upper half of the counter; each has words of its own.
        size: the number of words, at most `BLOCK`.
        out: holds the words; 15 bytes larger than they are. By default new memory does.
    """
    cipher = Cipher(algorithms.AES(key), modes.CTR(stream.to_bytes(8, "big") + bytes(8)))
    out = bytearray(8 * size + 15) if out is None else out
    cipher.encryptor().update_into(memoryview(_ZEROS)[: 8 * size], out)
    return np.frombuffer(out, np.uint64, size)
