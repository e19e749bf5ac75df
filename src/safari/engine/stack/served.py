"""Which convolutions the Triton kernels are written for. Readable without Triton."""

from __future__ import annotations

# The fewest channels that a matrix unit takes.
NARROWEST = 16
# The norm's kernels hold all channels of a pixel in one program.
WIDEST = 1024
# The kernels with pooling hold a layer's sums for the weights' gradient in one program: more do not fit its registers.
MOST_POOLED = 32 * 64


def padded(channels: int) -> int:
    """Number of channels, padded to the fewest that a matrix unit takes."""
    return max(channels, NARROWEST)


def serves(inner: int, outer: int, side: int = 3) -> bool:
    """Are there kernels for a convolution side x side with these numbers of channels in and out?

    Fewer than 16 inputs are padded with zeros; 1x1 convolutions are served from 64 channels on.

    >>> serves(3, 64), serves(512, 512), serves(64, 96), serves(16, 32, side=1)
    (True, True, False, False)
    """
    fits = [NARROWEST <= c <= WIDEST and c & (c - 1) == 0 for c in (padded(inner), outer)]
    return all(fits) and (side == 3 or is_wide(inner, outer, side))


def is_wide(cin: int, cout: int, side: int) -> bool:
    """Is a layer that is served one for `wide_kernels`? The others hold all of its channels in one program, which
    fits the registers up to about 64 x 64 of them; and they know 3x3 alone."""
    if side == 1:
        return min(cin, cout) >= 64
    return cin * cout > 64 * 64 or max(cin, cout) > 128


def pool_padded(channels: int) -> int:
    """Number of channels with which the kernels with pooling read an input: a power of two, at least 4.

    >>> pool_padded(1), pool_padded(3), pool_padded(20), pool_padded(32)
    (4, 4, 32, 32)
    """
    return max(4, 1 << (channels - 1).bit_length())


def whole_patch(channels: int) -> bool:
    """Do the kernels with pooling take a whole patch of 4x4 pixels as one product?

    That is a third more work than line by line, but a line of few channels does not fill a matrix unit: so the weights'
    gradient of FedAWE's first layer takes less than half of the time, the forward pass as long as before (H200).
    """
    return channels == 4


def serves_pool(inner: int, outer: int) -> bool:
    """Is there a kernel for a 3x3 convolution with these numbers of channels, ReLU and 2x2 max pooling?

    >>> serves_pool(3, 32), serves_pool(32, 32), serves_pool(64, 64), serves_pool(3, 24)
    (True, True, False, False)
    """
    fits = NARROWEST <= outer <= 64 and outer & (outer - 1) == 0
    return fits and pool_padded(inner) <= 64 and pool_padded(inner) * outer <= MOST_POOLED
