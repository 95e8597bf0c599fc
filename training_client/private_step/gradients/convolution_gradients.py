"""Per-example gradients of convolutions, transposed ones included, of one to three dimensions.

The gradient of one example correlates an image x with a map m of one value per position t of the
kernel: ∇[o, c, τ] = Σₜ m[o, t]·x[c, s·t + d·τ − p], for a stride s, a dilation d and a padding p.
In a convolution x is the input and m the output gradient; in a transposed one it is the other way
round.

**Held.** Where one example's gradient is not much larger than its image and map, it is computed in
the backward pass, and held. All examples are groups of one convolution, whose weight gradient is
not summed over them; or they are computed one after the other, where that is faster. Row i is a
function of example i alone, and what is held is clipped, so no further rounding is to be allowed
for, whatever algorithm computes it.

**Factors.** Otherwise image and map are kept. The weighted sum computes a few examples' gradients
at a time, and the norms come from those as well, or from Gram matrices in double precision, which
need no unfolding:

    ‖∇‖² = Σₜᵤ (mₜ·mᵤ)(Pₜ·Pᵤ),    Pₜ·Pᵤ = Σ_τ x[s·t + d·τ − p]·x[s·u + d·τ − p]

The product of two patches P is a sum of shifted entries of the Gram matrix of pixels, over the
places τ of the kernel at which both have a pixel. By the Cauchy-Schwarz inequality the magnitude M
of `chunked_gradients` is at most ‖m‖‖P‖, with ‖P‖² ≤ n·‖x‖² if no pixel is in more than n
patches. At one place of the kernel no pixel is met twice; so after a map
Σₜ x²[c, …] ≤ ‖x_c‖² bounds the terms.

This needs plain sums. PyTorch's weight gradients on a CPU are: oneDNN is called for the direct
algorithm, and the rest multiplies matrices. Elsewhere, and if oneDNN may round to half precision,
patches are unfolded and multiplied as matrices: cuDNN may choose Winograd's or Fourier transforms,
and rounds to TF32.

Which way is taken depends on the sizes of one example, never on values or the number of examples,
by which one record could change how others are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, gcd, inf, prod
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import conv1d, conv2d, conv3d, pad
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
    zero_rows,
)
from training_client.private_step.gradients.sequence_products import NormMethod
from training_client.private_step.kernels.compiled import is_on_cpu
from training_client.private_step.kernels.matmul import are_convolutions_precise, full_precision
from training_client.private_step.module_names import keeps_forward_of
from training_client.private_step.rounding_bounds import (
    gram_underflow,
    mapped_magnitude_underflow,
    rounding_error,
    squared_norm_upper_bounds,
)

_KINDS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_MEMORY: Final = 4  # held gradients may be so many times as large as image and map
_DEPTHWISE_MEMORY: Final = 32  # their other ways are far slower, and their gradients are small
_GROUPED_SIZE_MAX: Final = 40_000  # of a weight: above it a loop over examples is faster
_KERNEL_MIN: Final = 5  # depthwise kernels from this width on take maps as kernels
_GRAM_CHUNK_SIZE: Final = 1 << 21  # numbers in double precision at a time

# Costs for one example, in multiplications of a weight gradient in single precision on one core of
# a CPU; on an accelerator only the ratio of precisions is known (`sequence_products`).
_LOOP: Final = 1e6  # a call of a convolution, which a loop makes for each example
_GRAM_CALLS: Final = 5e5  # more calls than held gradients need, for each of a few examples
_PRODUCT_CALLS: Final = 2e5  # likewise
_DOUBLE: Final = 3.2
_ACCELERATOR_DOUBLE: Final = 64.0
_SHIFTED_ENTRY: Final = 10
_UNFOLDED_ENTRY: Final = 30
_HELD_COORDINATE: Final = 26  # is written, read for the norm, and read for the sum
_READ_COORDINATE: Final = 12

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The shape of a convolution's weight, and the positions at which it is applied.

    Attributes:
        shape: of the weight: maps, channels of one group, and one size for each dimension.
        stride: s, one for each dimension, as are the next two.
        padding: p; zeros before and after the image.
        dilation: d.
        groups: the number of groups of channels.
    """

    shape: torch.Size
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int

    @property
    def sizes(self) -> Sizes:
        """The kernel's size in each dimension."""
        return self.shape[2:]

    @property
    def places(self) -> int:
        """The number of places of the kernel."""
        return prod(self.sizes)

    @property
    def is_depthwise(self) -> bool:
        """Return whether each channel has a kernel and a map of its own."""
        return self.shape[:2] == (self.groups, 1)

    @property
    def is_pointwise(self) -> bool:
        """Return whether each position has one pixel, and each pixel one position."""
        return self.places == max(self.stride) == 1 and not any(self.padding)

    def weight_gradient(
        self, images: torch.Tensor, maps: torch.Tensor, groups: int
    ) -> torch.Tensor:
        """Return PyTorch's weight gradient of a convolution, summed over the rows of both.

        Args:
            images: of shape (rows, channels, …).
            maps: of shape (rows, maps, …).
            groups: the number of groups of both.
        """
        like = images.new_empty(maps.shape[1], self.shape[1], *self.sizes)
        none = [0] * len(self.sizes)
        found: torch.Tensor = torch.ops.aten.convolution_backward(
            maps, images, like, None, self.stride, self.padding, self.dilation, False, none, groups,
            [False, True, False],
        )[1]  # fmt: skip
        return found

    def patches(self, images: torch.Tensor, groups: int) -> torch.Tensor:
        """Unfold images into (rows · groups, channels · places of the kernel, positions)."""
        found = pad(images, [each for p in reversed(self.padding) for each in (p, p)])
        for dim, (size, step, apart) in enumerate(
            zip(self.sizes, self.stride, self.dilation, strict=True), start=2
        ):
            found = found.unfold(dim, apart * (size - 1) + 1, step)[..., ::apart]
        count = len(self.sizes)
        order = (0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count))
        positions = found.shape[2 : 2 + count].numel()
        return found.permute(order).reshape(len(images) * groups, -1, positions)

    def overlaps(self, image: Sequence[int], positions: Sequence[int]) -> Iterator[Overlap]:
        """Yield the positions that have a pixel at each place of the kernel, and these pixels."""
        by_dimension = [
            [_overlap(place * d - p, s, pixels, count) for place in range(size)]
            for size, s, d, p, pixels, count in zip(
                self.sizes, self.stride, self.dilation, self.padding, image, positions, strict=True
            )
        ]
        for found in product(*by_dimension):
            if all(there.stop > there.start for there, _ in found):
                yield tuple(there for there, _ in found), tuple(pixels for _, pixels in found)

    def patches_of_pixel(self, positions: Sequence[int]) -> int:
        """Return n, an upper bound on the number of patches that a pixel is in.

        In each dimension, one position has the pixel at one place τ, and d·τ has one remainder
        modulo the stride.
        """
        return prod(
            min(count, ceil(size * gcd(step, apart) / step))
            for count, size, step, apart in zip(
                positions, self.sizes, self.stride, self.dilation, strict=True
            )
        )


Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]


def _overlap(first: int, stride: int, pixels: int, positions: int) -> tuple[slice, slice]:
    """Return the positions t whose pixel first + stride·t is in the image, and these pixels."""
    start = max(0, -(first // stride))
    stop = max(start, min(positions, (pixels - 1 - first) // stride + 1))
    if start == stop:
        return slice(0, 0), slice(0, 0)
    pixel = first + stride * start
    return slice(start, stop), slice(pixel, first + stride * (stop - 1) + 1, stride)


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimated costs of the ways to a clipped sum, from the sizes of one example.

    Attributes:
        held: of gradients in memory; ∞ if they take too much of it.
        product: of norms from a few examples' gradients at a time.
        pixels: of norms by Gram matrices of pixels.
        patches: of norms by Gram matrices of unfolded patches.
    """

    held: float
    product: float
    pixels: float
    patches: float

    @property
    def norm_method(self) -> NormMethod:
        """The cheaper way to the norms of gradients that are not held."""
        return "product" if self.product <= min(self.pixels, self.patches) else "gram"

    @property
    def is_held(self) -> bool:
        """Return whether it is cheapest to hold gradients."""
        return self.held <= min(self.product, self.pixels, self.patches)


@lru_cache
def estimate_costs(kernel: Kernel, image: Sizes, positions: Sizes, on_cpu: bool) -> Costs:
    """Estimate the costs for one example.

    Args:
        kernel: of the convolution.
        image: the image's size in each dimension.
        positions: the number of positions of the kernel in each dimension.
        on_cpu: whether it is on a CPU, or on an accelerator.
    """
    outputs, channels = kernel.shape[0], kernel.shape[1] * kernel.groups
    size, pixels, terms = kernel.shape.numel(), prod(image), prod(positions)
    memory = _DEPTHWISE_MEMORY if kernel.is_depthwise else _MEMORY
    is_small = size <= memory * (terms * outputs + pixels * channels)
    once, loop = float(terms * size), _LOOP if size > _GROUPED_SIZE_MAX else 0.0
    if kernel.is_depthwise and is_small:
        return Costs(0.0, once, once, once)
    double = _DOUBLE if on_cpu else _ACCELERATOR_DOUBLE
    entries = sum(
        prod(each.stop - each.start for each in there) ** 2
        for there, _ in kernel.overlaps(image, positions)
    )
    of_sum = double * terms**2 * outputs + once + _GRAM_CALLS
    of_pixels = double * pixels**2 * channels + _SHIFTED_ENTRY * kernel.groups * entries
    of_patches = (double * terms + _UNFOLDED_ENTRY) * terms * channels * kernel.places
    return Costs(
        once + _HELD_COORDINATE * size + loop if is_small else inf,
        2 * once + _READ_COORDINATE * size + loop + _PRODUCT_CALLS,
        of_sum + of_pixels if on_cpu else inf,
        of_sum + of_patches,
    )


@dataclass(frozen=True)
class ConvolutionProducts(ChunkedGradients):
    """Per-example gradients of a convolution's weight, as images and maps.

    Attributes:
        images: x, of shape (examples, channels, …).
        maps: m, of shape (examples, maps, …).
        kernel: the weight's shape, and its positions.
        method: how norms are computed; None for the cheaper one.
    """

    images: torch.Tensor
    maps: torch.Tensor
    kernel: Kernel
    method: NormMethod | None = None

    @property
    def element_count(self) -> int:
        """The number of elements of images and maps."""
        return self.images.numel() + self.maps.numel()

    @property
    def terms(self) -> int:
        """The number of positions: of the products summed to one gradient."""
        return self.maps.shape[2:].numel()

    @property
    def example_count(self) -> int:
        """The number of examples."""
        return len(self.maps)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.kernel.shape

    @property
    def sample(self) -> torch.Tensor:
        """One of the stored tensors, whose dtype and device are those of the gradients."""
        return self.maps

    @cached_property
    def costs(self) -> Costs:
        """The costs of the ways to a clipped sum."""
        image, positions = tuple(self.images.shape[2:]), tuple(self.maps.shape[2:])
        return estimate_costs(self.kernel, image, positions, is_on_cpu(self.maps))

    def hold(self) -> MaterializedGradients:
        """Compute all gradients, by any algorithm: what is held is clipped."""
        if not self.element_count:
            return MaterializedGradients(self.maps.new_zeros(self.example_count, *self.shape))
        kernel = self.kernel
        is_wide = max(kernel.sizes) >= _KERNEL_MIN and max(kernel.stride) == 1 < self.terms
        if kernel.is_depthwise and is_wide:
            return MaterializedGradients(self._convolve_with_maps())
        return MaterializedGradients(self._correlate(self.images, self.maps, kernel.groups))

    def dense(self, examples: slice, rows: slice) -> torch.Tensor:
        """Compute some examples' gradients on `rows` of the weight, by plain sums."""
        images, maps, groups, own = self._of_rows(rows)
        images, maps = images[examples], maps[examples]
        if not self.element_count:
            return maps.new_zeros(len(maps), own.stop - own.start, *self.shape[1:])
        if self._sums_plainly:
            return self._correlate(images, maps, groups)[:, own]
        patches = self.kernel.patches(images, groups)
        found = torch.bmm(maps.reshape(len(patches), -1, self.terms), patches.mT)
        return found.view(len(maps), -1, *self.shape[1:])[:, own]

    def squared_norms(self, bound: float) -> torch.Tensor:
        """Return upper bounds on squared gradient norms per example; ∞ on excessive underflow."""
        if (self.method or self.costs.norm_method) == "product":
            return super().squared_norms(bound)
        by_pixels, groups = self.costs.pixels <= self.costs.patches, self.kernel.groups
        terms, found, pixels = self.terms, self._zeros(), self.images.shape[2:].numel()
        width = pixels if by_pixels else terms * self.kernel.places
        of_example = self.images.shape[1] * width + self.shape[0] * terms
        of_example += groups * max(terms, pixels if by_pixels else 0) ** 2
        step = max(1, _GRAM_CHUNK_SIZE // max(1, of_example))
        for start in range(0, self.example_count, step):
            part = slice(start, start + step)
            maps, images = self.maps[part], self.images[part]
            products = _gram_matrices(maps.reshape(len(maps) * groups, -1, terms))
            if by_pixels:
                products.mul_(self._gram_of_patches(images))
            else:
                products.mul_(_gram_matrices(self.kernel.patches(images, groups)))
            found[part] = products.view(len(maps), -1).sum(1)
        # each of the terms is at most (Σₜ‖mₜ‖‖Pₜ‖)² ≤ ‖m‖²‖P‖² in total
        map_squares, patch_squares = self._squared_sizes
        outputs, width = self.shape[0], self.shape[1] * self.kernel.places
        error = rounding_error(torch.float64, outputs + width + groups * terms * terms)
        found.add_(map_squares * patch_squares, alpha=error)
        found += gram_underflow(map_squares, patch_squares, outputs, width, groups * terms)
        return self._upper_bounds(found.clamp_min_(0.0), 1, bound)

    def magnitudes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two numbers per example, from which rounding and underflow errors are bounded."""
        map_squares, patch_squares = self._squared_sizes
        return map_squares * patch_squares, torch.maximum(map_squares, patch_squares)

    def mapped_magnitudes(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Bound ‖Σ|tᵢ|·scale‖² per example, whose gradient on `rows` is the sum of terms tᵢ."""
        images, maps, groups, own = self._of_rows(rows)
        count, depth = len(maps), self.shape[1]
        squares = scale.double().square().flatten(2).sum(2)
        whole = squares.new_zeros(maps.shape[1], depth)
        whole[own] = squares
        x, m = (
            squared_norm_upper_bounds(each.reshape(count * each.shape[1], -1)).view(
                count, groups, -1
            )
            for each in (images, maps)
        )
        sums = torch.bmm(x.transpose(0, 1), whole.view(groups, -1, depth).mT)
        found = sums.mul_(m.transpose(0, 1)).sum((0, 2))
        size = scale.numel()
        found.mul_(1 + rounding_error(torch.float64, size))
        return found + mapped_magnitude_underflow(m.sum((1, 2)), x.sum((1, 2)), size)

    def select(self, kept: torch.Tensor) -> ConvolutionProducts:
        """Return the per-example gradients of those examples where `kept` is true."""
        return replace(self, images=self.images[kept], maps=self.maps[kept])

    def zero_others(self, kept: torch.Tensor) -> ConvolutionProducts:
        """Return the gradients with 0 for examples where `kept` is false."""
        images, maps = zero_rows(self.images, kept), zero_rows(self.maps, kept)
        return replace(self, images=images, maps=maps)

    @property
    def _sums_plainly(self) -> bool:
        """Return whether a convolution adds up in full precision, and by no transform."""
        is_double = self.maps.dtype == torch.float64
        return is_on_cpu(self.maps) and (is_double or are_convolutions_precise())

    @cached_property
    def _squared_sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Upper bounds on the squared norms of each example's map, and of its patches."""
        patches = self.kernel.patches_of_pixel(self.maps.shape[2:])
        patch_squares = squared_norm_upper_bounds(self.images.flatten(1)) * patches
        return squared_norm_upper_bounds(self.maps.flatten(1)), patch_squares

    def _of_rows(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, int, slice]:
        """Return the groups that rows of the weight are in.

        Returns:
            Their images and maps, their number, and which of their rows these rows are.
        """
        outputs, depth = self.shape[:2]
        width = outputs // self.kernel.groups
        first, last = rows.start // width, -(-rows.stop // width)
        images = self.images[:, first * depth : last * depth]
        if last - first == 1:
            return images, self.maps[:, rows], 1, slice(0, rows.stop - rows.start)
        own = slice(rows.start - first * width, rows.stop - first * width)
        return images, self.maps[:, first * width : last * width], last - first, own

    def _correlate(self, images: torch.Tensor, maps: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the gradient of each example, by PyTorch's weight gradients."""
        count, outputs = maps.shape[:2]
        shape = (count, outputs, *self.shape[1:])
        if self.terms == 1:
            patches = self.kernel.patches(images, groups)
            return (maps.reshape(len(patches), -1, 1) * patches.mT).view(shape)
        if self.kernel.is_pointwise:
            left, right = (each.reshape(count * groups, -1, self.terms) for each in (maps, images))
            return torch.bmm(left, right.mT).view(shape)
        if self.shape.numel() <= _GROUPED_SIZE_MAX:
            if count == 1:  # oneDNN has another algorithm, which rounds otherwise, for one group
                return self._correlate(_twice(images), _twice(maps), groups)[:1]
            left, right = (each.reshape(1, -1, *each.shape[2:]) for each in (images, maps))
            return self.kernel.weight_gradient(left, right, count * groups).view(shape)
        found = maps.new_empty(shape)
        for at in range(count):
            one = slice(at, at + 1)
            found[at] = self.kernel.weight_gradient(images[one], maps[one], groups)
        return found

    def _convolve_with_maps(self) -> torch.Tensor:
        """Return the gradients of a depthwise weight: maps are the kernels of one convolution.

        PyTorch's own weight gradient takes up to thirty times as long for kernels of this size.
        """
        kernel = self.kernel
        rows = self.images.reshape(1, -1, *self.images.shape[2:])
        kernels = self.maps.reshape(-1, 1, *self.maps.shape[2:])
        convolve: Any = (conv1d, conv2d, conv3d)[len(kernel.sizes) - 1]
        found: torch.Tensor = convolve(
            rows, kernels, None, kernel.dilation, kernel.padding, kernel.stride, len(kernels)
        )
        for dim, size in enumerate(kernel.sizes, start=2):
            found = found.narrow(dim, 0, size)
        return found.reshape(self.example_count, *self.shape)

    def _gram_of_patches(self, images: torch.Tensor) -> torch.Tensor:
        """Return the products of all pairs of patches, from those of all pairs of pixels."""
        sizes, positions = images.shape[2:], self.maps.shape[2:]
        rows = images.reshape(len(images) * self.kernel.groups, -1, sizes.numel())
        entries = _gram_matrices(rows).view(len(rows), *sizes, *sizes)
        found = entries.new_zeros(len(rows), *positions, *positions)
        for there, pixels in self.kernel.overlaps(sizes, positions):
            found[(slice(None), *there, *there)] += entries[(slice(None), *pixels, *pixels)]
        return found.view(len(rows), self.terms, self.terms)


def _twice(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows])


def _gram_matrices(columns: torch.Tensor) -> torch.Tensor:
    """Return the products of all pairs of columns of each matrix, in double precision."""
    columns = columns.double()
    return torch.bmm(columns.mT, columns)


def is_convolution(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution of PyTorch's, with its original forward pass."""
    return any(
        keeps_forward_of(layer, kind)
        and getattr(type(layer), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        for kind in _KINDS
    )


def are_gradients_held(layer: _ConvNd, inputs: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether a convolution's gradients are best computed in the backward pass, and held."""
    if inputs.dim() != layer.weight.dim():
        return False
    images, maps = _images_and_maps(layer, inputs, output)
    kernel, added = _kernel_of(layer, images.shape[2:], maps.shape[2:])
    return estimate_costs(
        kernel, _padded(images.shape[2:], added), tuple(maps.shape[2:]), is_on_cpu(inputs)
    ).is_held


def convolution_gradients(
    layer: _ConvNd, inputs: torch.Tensor, gradient: torch.Tensor, path: str | None = None
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of a convolution's weight and bias.

    Args:
        layer: one that `is_convolution` accepts.
        inputs: of shape (examples, channels, …), in any memory format.
        gradient: of the outputs, likewise.
        path: "gram" or "product" for the norms, "held" to hold gradients; the cheapest by default.
    """
    found: dict[torch.Tensor, ExampleGradients] = {}
    with full_precision(gradient.device):
        if layer.weight.requires_grad:
            products = _convolution_products(layer, inputs, gradient)
            if path == "held" or (path is None and products.costs.is_held):
                found[layer.weight] = products.hold()
            else:
                method: Any = path if path in ("gram", "product") else None
                found[layer.weight] = replace(products, method=method)
        if layer.bias is not None and layer.bias.requires_grad:
            summed = gradient.sum(tuple(range(2, gradient.dim())))
            found[layer.bias] = MaterializedGradients(summed)
    return found


def _convolution_products(
    layer: _ConvNd, inputs: torch.Tensor, gradient: torch.Tensor
) -> ConvolutionProducts:
    """Return the image and the map of each example, the image padded if zeros will not do."""
    images, maps = _images_and_maps(layer, inputs, gradient)
    kernel, added = _kernel_of(layer, images.shape[2:], maps.shape[2:])
    if added:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        sides = [each for pair in reversed(added) for each in pair]
        images = pad(images, sides, mode=mode)
    # contiguous, as they are after an example is excluded: another memory layout would be summed
    # and rounded in another order
    return ConvolutionProducts(images.contiguous(), maps.contiguous(), kernel)


def _images_and_maps(
    layer: _ConvNd, inputs: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which is the image and which the map."""
    return (outputs, inputs) if isinstance(layer, _ConvTransposeNd) else (inputs, outputs)


def _kernel_of(
    layer: _ConvNd, image: Sequence[int], positions: Sequence[int]
) -> tuple[Kernel, list[tuple[int, int]]]:
    """Return a layer's kernel, and what must be added on both sides of an image before it is used.

    Zeros are not added if they are the same on both sides: the kernel's padding says so. A
    transposed convolution may leave out more of its output than a stride; this is cut off.
    """
    # private: PyTorch has no other form of the padding "same"
    flat: list[int] = layer._reversed_padding_repeated_twice
    sides = list(zip(flat[-2::-2], flat[::-2], strict=True))
    added = []
    for at, (left, right) in enumerate(sides):
        step, span = layer.stride[at], layer.dilation[at] * (layer.kernel_size[at] - 1) + 1
        unused = image[at] + left + right - span - step * (positions[at] - 1)
        added.append((left, right - unused if unused >= step else right))
    is_even = layer.padding_mode == "zeros" and all(
        left == right == after for (left, right), (_, after) in zip(sides, added, strict=True)
    )
    padding: Sizes = tuple(left for left, _ in sides) if is_even else (0,) * len(sides)
    kernel = Kernel(
        layer.weight.shape, tuple(layer.stride), padding, tuple(layer.dilation), layer.groups
    )
    return kernel, [] if is_even else added


def _padded(sizes: Sequence[int], added: Sequence[tuple[int, int]]) -> Sizes:
    """Return the sizes of an image after something is added on both sides."""
    if not added:
        return tuple(sizes)
    return tuple(size + sum(each) for size, each in zip(sizes, added, strict=True))
