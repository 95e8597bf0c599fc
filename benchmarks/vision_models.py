"""Vision models of the benchmark, as published, with group instead of batch normalisation."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import interpolate, scaled_dot_product_attention


def group_norm(channels: int, groups: int = 32) -> nn.GroupNorm:
    """Return a normalisation of at most `groups` groups of channels."""
    return nn.GroupNorm(min(groups, channels), channels)


class ResidualBlock(nn.Module):
    """The basic block of a residual network (arXiv 1512.03385): two convolutions of 3×3."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), group_norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), group_norm(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), group_norm(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        found: torch.Tensor = (self.branch(images) + self.shortcut(images)).relu()
        return found


def build_resnet18() -> nn.Module:
    """Return ResNet-18, with the first layers that it has for images of 224×224 pixels."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        ResidualBlock(inputs if at == 0 else outputs, outputs, 2 if at == 0 < stage else 1)
        for stage, (inputs, outputs) in enumerate(pairwise(widths))
        for at in range(2)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), group_norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class WideBlock(nn.Module):
    """The block of a wide residual network (arXiv 1605.07146), normalised before it convolves."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(group_norm(inputs, 16), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1), group_norm(outputs, 16), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows = self.first(images)
        found: torch.Tensor = self.branch(rows)
        return found + (images if self.shortcut is None else self.shortcut(rows))


def build_wrn() -> nn.Module:
    """Return WRN-16-4, as in arXiv 2204.13650."""
    widths = (16, 64, 128, 256)
    blocks = [
        WideBlock(inputs if at == 0 else outputs, outputs, 2 if at == 0 < stage else 1)
        for stage, (inputs, outputs) in enumerate(pairwise(widths))
        for at in range(2)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, group_norm(256, 16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


class ImageNorm(nn.LayerNorm):
    """A layer norm over the channels of images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised images."""
        return super().forward(images.movedim(1, -1)).movedim(-1, 1)


class NextBlock(nn.Module):
    """The block of a ConvNeXt (arXiv 2201.03545): a depthwise convolution and two linear maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1e-6))
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.maps = nn.Sequential(
            nn.LayerNorm(width, 1e-6), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows = self.maps(self.depthwise(images).movedim(1, -1))
        return images + (self.scale * rows).movedim(-1, 1)


class ScaledBlock(NextBlock):
    """The same block, with the scale in a layer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        scale, self.scale = self.scale, None  # type: ignore[assignment]
        self.scaling = Scale(scale)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows = self.maps(self.depthwise(images).movedim(1, -1))
        found: torch.Tensor = images + self.scaling(rows).movedim(-1, 1)
        return found


class Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scaled rows."""
        return rows * self.weight


def build_convnext(block: type[NextBlock] = NextBlock) -> nn.Module:
    """Return ConvNeXt-T."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ImageNorm(96, 1e-6)]
    for stage, (width, depth) in enumerate(zip((96, 192, 384, 768), (3, 3, 9, 3), strict=True)):
        if stage:
            layers += [ImageNorm(width // 2, 1e-6), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [block(width) for _ in range(depth)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768, 1e-6),
        nn.Linear(768, 10),
    )  # fmt: skip


class ImageTransformer(nn.Module):
    """A vision transformer (arXiv 2010.11929) with a class token and positions of its own.

    Args:
        width: of its rows.
        patch: the width of a patch in pixels.
        patches: of an image.
        blocks: from one sequence per example to another.
    """

    def __init__(self, width: int, patch: int, patches: int, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the class token's logits."""
        rows = self.embedding(images).flatten(2).mT
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.positions
        found: torch.Tensor = self.last(self.blocks(rows)[:, 0])
        return found


class TimedBlock(nn.Module):
    """The residual block of a diffusion model's U-Net (arXiv 2006.11239)."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            group_norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outputs))
        self.second = nn.Sequential(
            group_norm(outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, images: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows = self.first(images) + self.time(time)[:, :, None, None]
        found: torch.Tensor = self.shortcut(images) + self.second(rows)
        return found


class PixelAttention(nn.Module):
    """Attention among the pixels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.inner, self.outer = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images with what the attention adds."""
        parts = self.inner(self.norm(images)).flatten(2).mT[:, None].chunk(3, -1)
        mixed = scaled_dot_product_attention(*parts)[:, 0].mT
        found: torch.Tensor = images + self.outer(mixed.reshape(images.shape))
        return found


class DiffusionUNet(nn.Module):
    """A diffusion model's U-Net; its output is averaged over pixels, to be classified."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        time, wide = 4 * width, 2 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([
            TimedBlock(width, width, time), nn.Conv2d(width, width, 3, 2, 1),
            TimedBlock(width, wide, time), nn.Conv2d(wide, wide, 3, 2, 1),
            TimedBlock(wide, wide, time),
        ])  # fmt: skip
        self.middle = PixelAttention(wide)
        self.up = nn.ModuleList([
            TimedBlock(2 * wide, wide, time), nn.Conv2d(wide, wide, 3, padding=1),
            TimedBlock(2 * wide, width, time), nn.Conv2d(width, width, 3, padding=1),
            TimedBlock(2 * width, width, time),
        ])  # fmt: skip
        self.last = nn.Sequential(group_norm(width), nn.SiLU(), nn.Conv2d(width, 10, 3, padding=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a mean over pixels; the time of the diffusion is the mean of an image."""
        frequencies = torch.logspace(0, 3, self.width // 2, device=images.device)
        angles = images.mean((1, 2, 3))[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        rows, kept = self.first(images), []
        for each in self.down:
            rows = each(rows, time) if isinstance(each, TimedBlock) else each(rows)
            kept += [rows] if isinstance(each, TimedBlock) else []
        rows = self.middle(rows)
        for each in self.up:
            if isinstance(each, TimedBlock):
                rows = each(torch.cat([rows, kept.pop()], 1), time)
            else:
                rows = each(interpolate(rows, scale_factor=2.0))
        found: torch.Tensor = self.last(rows).mean((2, 3))
        return found
