"""The kernels of `checksum`, in a module of their own: planning does not import Triton.

XXH3-64 of inputs of exactly 4096 bytes, seed 0, default secret: the path for long inputs of
https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md. Eight accumulators take a stripe
of 64 bytes at a time, in four blocks of 16 stripes:

    accumulator[i]     += low half × high half of (word[i] xor secret)
    accumulator[i ^ 1] += word[i]

After each block but the last they are scrambled. The last stripe has its own piece of the secret.
At the end pairs are multiplied to 128 bits, folded, summed and mixed once more.

Neighbouring lanes exchange their words. So a thread keeps two of them, the even and the odd one of
a pair, and loads both as one word of 16 bytes; nothing passes between threads until the sum at the
end. Four threads take a page, 64 neighbouring bytes at a time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
# Kernels have no types: Triton compiles the source, and its decorator has none.

from __future__ import annotations

import triton
import triton.language as tl

# Where things are in the table of constants; `launch_plan.py` fills it.
LAST_KEYS = tl.constexpr(24)
MERGE_KEYS = tl.constexpr(32)
STARTS = tl.constexpr(40)
PAGE_SUM = tl.constexpr(48)
FLIPS = tl.constexpr(49)

PAGE_WORDS = tl.constexpr(512)
STRIPE_WORDS = tl.constexpr(8)
BLOCK_STRIPES = tl.constexpr(16)
SCRAMBLE_PRIME = tl.constexpr(0x9E3779B1)
MIX_PRIME = tl.constexpr(0x165667919E3779F9)
LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _words(address, offsets, nbytes, ALIGN: tl.constexpr):
    """The words at `offsets`, which counts words; zeros beyond the end."""
    if ALIGN >= 8:
        source = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), ALIGN)
        words = tl.multiple_of(nbytes // 8, ALIGN // 8)
        values = tl.load(source + offsets, mask=offsets < words, other=0)
    else:
        # Joined from two words at multiples of 8. A word is read only if it has a byte of the
        # input, so nothing beyond an allocation is read; its other bytes are shifted or masked out.
        skew = address % 8
        source = (address - skew).to(tl.pointer_type(tl.uint64))
        end = nbytes + skew
        low = tl.load(source + offsets, mask=offsets * 8 < end, other=0)
        high = tl.load(source + offsets + 1, mask=offsets * 8 + 8 < end, other=0)
        shift = (8 * skew).to(tl.uint64)
        values = (low >> shift) | ((high << 1) << (63 - shift))
        left = tl.minimum(tl.maximum(nbytes - offsets * 8, 0), 8).to(tl.uint64)
        beyond = (8 - left) * 8 % 64  # bits; shifted out: ~0 fails in Triton 3.7's interpreter
        values = tl.where(left > 0, (values << beyond) >> beyond, 0)
    return values


@triton.jit
def _pairs(address, offsets, nbytes, ALIGN: tl.constexpr):
    """The words at the even `offsets` [pages, 4], and the word after each.

    ALIGN (16, 8 or 1) divides `address` and `nbytes`.
    """
    if ALIGN == 16:
        both = offsets[:, :, None] + tl.arange(0, 2)[None, None, :]
        even, odd = tl.split(_words(address, both, nbytes, ALIGN))
    else:  # here a thread would not have both, and a split would go through shared memory
        even = _words(address, offsets, nbytes, ALIGN)
        odd = _words(address, offsets + 1, nbytes, ALIGN)
    return even, odd


@triton.jit
def _product(values):
    """Low half × high half."""
    return (values & LOW_HALF) * (values >> 32)


@triton.jit
def _fold(a, b):
    """The halves of the 128 bits of a × b, one xor the other."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _avalanche(values):
    values = (values ^ (values >> 37)) * MIX_PRIME
    return values ^ (values >> 32)


@triton.jit
def _scrambled(sums, keys):
    return (sums ^ (sums >> 47) ^ keys) * SCRAMBLE_PRIME


# Numbers and addresses differ from call to call: they are no reason to compile again.
@triton.jit(do_not_specialize=["tiles", "count"])
def hash_pages(constants, tiles, count, hashes, PAGES: tl.constexpr, ALIGN: tl.constexpr):
    """Hash the pages of a tile into `hashes`, uint64. One program per tile.

    `tiles` is int64 [3, count]: the address of up to PAGES consecutive pages, how many bytes they
    have (padded with zeros; at least one page is hashed), and the index in `hashes` of the first.
    """
    row = tl.program_id(0).to(tl.int64)
    address = tl.load(tiles + row)
    nbytes = tl.load(tiles + count + row)
    first = tl.load(tiles + 2 * count + row)
    page = tl.arange(0, PAGES)
    pair = 2 * tl.arange(0, 4)[None, :]
    words = page[:, None] * PAGE_WORDS + pair
    none = tl.zeros([PAGES, 4], tl.uint64)
    even_sums = none + tl.load(constants + STARTS + pair)
    odd_sums = none + tl.load(constants + STARTS + pair + 1)
    for block in range(4):
        begin = block * BLOCK_STRIPES * STRIPE_WORDS
        even_keys = tl.load(constants + pair)
        for stripe in tl.static_range(BLOCK_STRIPES):
            even, odd = _pairs(address, words + (begin + stripe * STRIPE_WORDS), nbytes, ALIGN)
            keys = constants + stripe
            if stripe == BLOCK_STRIPES - 1:  # the page's last stripe has its own keys
                keys = constants + tl.where(block == 3, LAST_KEYS, stripe)
                even_keys = tl.load(keys + pair)
            odd_keys = tl.load(keys + pair + 1)
            even_sums += _product(even ^ even_keys) + odd
            odd_sums += _product(odd ^ odd_keys) + even
            even_keys = odd_keys  # each stripe's keys begin a word after those of the one before
        if block < 3:
            keys = constants + BLOCK_STRIPES
            even_sums = _scrambled(even_sums, tl.load(keys + pair))
            odd_sums = _scrambled(odd_sums, tl.load(keys + pair + 1))
    even_sums ^= tl.load(constants + MERGE_KEYS + pair)
    odd_sums ^= tl.load(constants + MERGE_KEYS + pair + 1)
    found = _avalanche(tl.sum(_fold(even_sums, odd_sums), axis=1) + tl.load(constants + PAGE_SUM))
    pages = tl.maximum(tl.cdiv(nbytes, PAGE_WORDS * 8), 1)
    tl.store(hashes + first + page, found, mask=page < pages)


@triton.jit(do_not_specialize=["segments", "count"])
def finish(constants, segments, count, hashes, checksums, SEGMENTS: tl.constexpr):
    """XXH3-64 of 16 bytes for each segment: its root and its length.

    `segments` is int64 [2, count]: which of `hashes` is the root, and the length in bytes.
    """
    row = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    mask = row < count
    root = tl.load(hashes + tl.load(segments + row, mask=mask, other=0), mask=mask, other=0)
    length = tl.load(segments + count + row, mask=mask, other=0).to(tl.uint64)
    low = root ^ tl.load(constants + FLIPS)
    high = length ^ tl.load(constants + FLIPS + 1)
    swapped = tl.zeros_like(low)
    for byte in tl.static_range(8):
        swapped |= ((low >> (8 * byte)) & 0xFF) << (56 - 8 * byte)
    found = _avalanche(swapped + high + _fold(low, high) + 16)
    tl.store(checksums + row, found, mask=mask)
