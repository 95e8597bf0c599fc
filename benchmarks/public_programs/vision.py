"""Programs on images and point clouds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.public_programs.program import Task, program

SIZE = 6  # examples of a batch


def images(channels: int = 3, pixels: int = 16) -> torch.Tensor:
    return torch.randn(SIZE, channels, pixels, pixels)


def labels(classes: int = 5) -> torch.Tensor:
    return torch.randint(classes, (SIZE,))


def classes_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class MnistNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(288, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@program("MNIST CNN", "pytorch/examples", "https://github.com/pytorch/examples/tree/main/mnist")
def mnist_cnn() -> Task:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(output, target, reduction="none")

    return Task(MnistNet(), images(1), labels(10), loss)


class BasicBlock(nn.Module):
    """A block of a ResNet, whose shortcut is padded with zeros."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(outside), norm(outside)
        self.more, self.stride = outside - inside, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2))
        out += x
        return F.relu(out)


def resnet(norm: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False), norm(8), nn.ReLU(inplace=True),
        BasicBlock(8, 8, 1, norm), BasicBlock(8, 16, 2, norm),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@program(
    "CIFAR ResNet, GroupNorm",
    "akamaster/pytorch_resnet_cifar10",
    "https://github.com/akamaster/pytorch_resnet_cifar10/blob/master/resnet.py",
)
def resnet_group_norm() -> Task:
    return Task(resnet(lambda n: nn.GroupNorm(4, n)), images(), labels(), classes_loss)


class StandardisedConv2d(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        weight = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        weight = weight / std.expand_as(weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@program(
    "standardised convolutions",
    "joe-siyuan-qiao/WeightStandardization",
    "https://github.com/joe-siyuan-qiao/WeightStandardization",
)
def weight_standardisation() -> Task:
    model = nn.Sequential(
        StandardisedConv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        StandardisedConv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.AvgPool2d(7), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return Task(model, images(), labels(), classes_loss)


class WideBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.equal = inside == outside
        self.shortcut = None if self.equal else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.equal:
            x = F.relu(self.norm1(x))
        out = x if not self.equal else F.relu(self.norm1(x))
        out = F.relu(self.norm2(self.conv1(out)))
        out = F.dropout(out, p=0.1, training=self.training)
        return torch.add(x if self.shortcut is None else self.shortcut(x), self.conv2(out))


@program(
    "wide ResNet with dropout",
    "xternalz/WideResNet-pytorch",
    "https://github.com/xternalz/WideResNet-pytorch/blob/master/wideresnet.py",
)
def wide_resnet() -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), WideBlock(8, 16, 1), WideBlock(16, 16, 1),
        WideBlock(16, 32, 2), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip
    return Task(model, images(), labels(), classes_loss)


def drop_path(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    """Leave out the whole branch of some examples."""
    if rate == 0.0 or not training:
        return x
    keep = 1 - rate
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask.div_(keep)


class ChannelsFirstNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / ((x - mean).pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.gamma = nn.GELU(), nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(x)))
        return kept + drop_path(x.permute(0, 3, 1, 2), 0.2, self.training)


@program(
    "ConvNeXt with layer scale and drop path",
    "facebookresearch/ConvNeXt",
    "https://github.com/facebookresearch/ConvNeXt/blob/main/models/convnext.py",
)
def convnext() -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), ChannelsFirstNorm(8), ConvNextBlock(8), ChannelsFirstNorm(8),
        nn.Conv2d(8, 12, 2, 2), ConvNextBlock(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LayerNorm(12), nn.Linear(12, 5),
    )  # fmt: skip
    return Task(model, images(), labels(), classes_loss)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm = nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (each.view(b, n, self.heads, -1).transpose(1, 2) for each in qkv)
        attn = (torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1)
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, d))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Sequential(
            nn.LayerNorm(3 * patch**2), nn.Linear(3 * patch**2, width), nn.LayerNorm(width)
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, width))
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.ModuleList([Attention(width) for _ in range(2)])
        self.feed = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, 5)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        b, c, h, w = img.shape
        p = self.patch
        x = img.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        x = self.embed(x)
        cls_tokens = self.cls_token.repeat(b, 1, 1)
        x = torch.cat((cls_tokens, x), dim=1)
        x += self.pos_embedding[:, : x.shape[1]]
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = attention(x) + x
            x = feed(x) + x
        return self.head(x[:, 0])


@program(
    "ViT with a class token",
    "lucidrains/vit-pytorch",
    "https://github.com/lucidrains/vit-pytorch/blob/main/vit_pytorch/vit.py",
)
def vit() -> Task:
    return Task(VisionTransformer(), images(), labels(), classes_loss)


class SwinBlock(nn.Module):
    """Attention in windows of an image, which may be shifted, with a table of relative biases."""

    attn_mask: torch.Tensor
    index: torch.Tensor

    def __init__(self, width: int, side: int, window: int, shift: int, heads: int = 2) -> None:
        super().__init__()
        self.side, self.window, self.shift, self.heads = side, window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        coords = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        mask = torch.zeros(1, side, side, 1)
        if shift:
            parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
            for count, (h, w) in enumerate((h, w) for h in parts for w in parts):
                mask[:, h, w, :] = count
        windows = self.partition(mask).squeeze(-1)
        apart = windows[:, None] - windows[:, :, None]
        self.register_buffer("attn_mask", apart.masked_fill(apart != 0, -100.0))

    def partition(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        m = self.window
        x = x.view(b, h // m, m, w // m, m, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, m * m, c)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        count = self.attn_mask.shape[0]
        attn = attn.view(b // count, count, self.heads, n, n) + self.attn_mask[None, :, None]
        attn = attn.view(-1, self.heads, n, n).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, length, c = x.shape
        side, m = self.side, self.window
        kept = x
        x = torch.roll(self.norm1(x).view(b, side, side, c), (-self.shift,) * 2, dims=(1, 2))
        windows = self.attend(self.partition(x))
        x = windows.view(b, side // m, side // m, m, m, c).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = torch.roll(x.view(b, side, side, c), (self.shift,) * 2, dims=(1, 2))
        x = kept + x.view(b, length, c)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12)
        self.blocks = nn.Sequential(SwinBlock(12, 4, 2, 0), SwinBlock(12, 4, 2, 1))
        self.merge_norm, self.merge = nn.LayerNorm(48), nn.Linear(48, 24, bias=False)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.norm(self.embed(x).flatten(2).transpose(1, 2)))
        x = x.view(x.shape[0], 4, 4, 12)
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.merge(self.merge_norm(torch.cat(parts, -1).view(x.shape[0], -1, 48)))
        return self.head(x.mean(1))


@program(
    "Swin with shifted windows",
    "microsoft/Swin-Transformer",
    "https://github.com/microsoft/Swin-Transformer/blob/main/models/swin_transformer.py",
)
def swin() -> Task:
    return Task(Swin(), images(), labels(), classes_loss)


class MixerBlock(nn.Module):
    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Conv1d(positions, 24, 1), nn.GELU(), nn.Conv1d(24, positions, 1)
        )
        self.channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x))
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 12), MixerBlock(16, 12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(dim=1))


@program(
    "MLP-Mixer",
    "lucidrains/mlp-mixer-pytorch",
    "https://github.com/lucidrains/mlp-mixer-pytorch/blob/main/mlp_mixer_pytorch/mlp_mixer_pytorch.py",
)
def mlp_mixer() -> Task:
    return Task(Mixer(), images(), labels(), classes_loss)


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.GroupNorm(2, outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.GroupNorm(2, outside),
            nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inc, self.down = DoubleConv(3, 8), nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up, self.conv = nn.ConvTranspose2d(16, 8, 2, stride=2), DoubleConv(16, 8)
        self.outc = nn.Conv2d(8, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.inc(x)
        two = self.up(self.down(one))
        diff_y, diff_x = one.size()[2] - two.size()[2], one.size()[3] - two.size()[3]
        two = F.pad(two, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.outc(self.conv(torch.cat([one, two], dim=1)))


def dice_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Dice of each image, beside the cross entropy of its pixels."""
    probabilities = outputs.softmax(1)
    truth = F.one_hot(targets, 3).permute(0, 3, 1, 2).float()
    inter = 2 * (probabilities * truth).sum(dim=(-1, -2))
    sets = probabilities.sum(dim=(-1, -2)) + truth.sum(dim=(-1, -2))
    dice = (inter + 1e-6) / (sets + 1e-6)
    pixels = F.cross_entropy(outputs, targets, reduction="none").mean(dim=(1, 2))
    return pixels + 1 - dice.mean(1)


@program(
    "U-Net with dice of each image",
    "milesial/Pytorch-UNet",
    "https://github.com/milesial/Pytorch-UNet/blob/master/utils/dice_score.py",
)
def unet_dice() -> Task:
    return Task(UNet(3), images(pixels=14), torch.randint(3, (SIZE, 14, 14)), dice_loss)


class Fcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.1), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(x))
        return F.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=False)


@program(
    "FCN segmentation, ignored pixels",
    "pytorch/vision",
    "https://github.com/pytorch/vision/blob/main/references/segmentation/train.py",
)
def fcn_segmentation() -> Task:
    targets = torch.randint(4, (SIZE, 16, 16)).masked_fill(torch.rand(SIZE, 16, 16) < 0.2, 255)

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = F.cross_entropy(outputs, target, ignore_index=255, reduction="none")
        return found.sum((1, 2)) / (target != 255).sum((1, 2)).clamp(min=1)

    return Task(Fcn(), images(), targets, loss)


class DetectionHead(nn.Module):
    def __init__(self, anchors: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.classes = classes
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.loc = nn.Conv2d(8, anchors * 4, 3, padding=1)
        self.conf = nn.Conv2d(8, anchors * classes, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        loc = self.loc(x).permute(0, 2, 3, 1).contiguous()
        conf = self.conf(x).permute(0, 2, 3, 1).contiguous()
        return loc.view(loc.size(0), -1, 4), conf.view(conf.size(0), -1, self.classes)


@program(
    "SSD head, hard negatives of each image",
    "amdegroot/ssd.pytorch",
    "https://github.com/amdegroot/ssd.pytorch/blob/master/layers/modules/multibox_loss.py",
)
def ssd_multibox() -> Task:
    matched = torch.randint(4, (SIZE, 48)) * (torch.rand(SIZE, 48) < 0.3)
    matched[:, 0] = 1
    targets = {"classes": matched, "boxes": torch.randn(SIZE, 48, 4)}

    def loss(
        outputs: tuple[torch.Tensor, torch.Tensor], target: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        loc, conf = outputs
        pos = target["classes"] > 0
        num_pos = pos.long().sum(1, keepdim=True)
        boxes = F.smooth_l1_loss(loc, target["boxes"], reduction="none").sum(2) * pos
        all_conf = F.cross_entropy(conf.transpose(1, 2), target["classes"], reduction="none")
        _, order = all_conf.masked_fill(pos, 0.0).sort(1, descending=True)
        _, rank = order.sort(1)
        neg = rank < torch.clamp(3 * num_pos, max=pos.size(1) - 1)
        classes = all_conf * (pos | neg)
        return (boxes.sum(1) + classes.sum(1)) / num_pos.squeeze(1)

    return Task(DetectionHead(), images(), targets, loss)


class SuperResolution(nn.Module):
    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 8, 3, 1, 1)
        self.conv3, self.shuffle = nn.Conv2d(8, factor**2, 3, 1, 1), nn.PixelShuffle(factor)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.shuffle(self.conv3(x))


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets, reduction="none").flatten(1).mean(1)


@program(
    "super-resolution by pixel shuffle",
    "pytorch/examples",
    "https://github.com/pytorch/examples/tree/main/super_resolution",
)
def super_resolution() -> Task:
    return Task(SuperResolution(), images(1, 8), images(1, 16), squared_error)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return F.hardsigmoid(self.fc2(F.relu(self.fc1(scale)))) * x


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, 16, 1, bias=False), nn.GroupNorm(4, 16), nn.Hardswish(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.GroupNorm(4, 16),
            SqueezeExcite(16), nn.Hardswish(inplace=True),
            nn.Conv2d(16, width, 1, bias=False), nn.GroupNorm(4, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + x


@program(
    "MobileNetV3, squeeze and excite, in place",
    "pytorch/vision",
    "https://github.com/pytorch/vision/blob/main/torchvision/models/mobilenetv3.py",
)
def mobilenet() -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Hardswish(inplace=True), InvertedResidual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.Hardswish(inplace=True),
        nn.Dropout(0.2, inplace=True), nn.Linear(16, 5),
    )  # fmt: skip
    return Task(model, images(), labels(), classes_loss)


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(4, 8), nn.Conv2d(8, growth, 3, padding=1, bias=False)

    def bottleneck(self, *features: torch.Tensor) -> torch.Tensor:
        return self.conv1(F.relu(self.norm1(torch.cat(features, 1))))

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        found = checkpoint(self.bottleneck, *features, use_reentrant=False)
        return self.conv2(F.relu(self.norm2(found)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList([DenseLayer(8, 4), DenseLayer(12, 4), DenseLayer(16, 4)])
        self.head = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.first(x)]
        for layer in self.layers:
            features.append(layer(features))
        x = F.relu(torch.cat(features, 1), inplace=True)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


@program(
    "DenseNet, gradient checkpointing",
    "pytorch/vision",
    "https://github.com/pytorch/vision/blob/main/torchvision/models/densenet.py",
)
def densenet_checkpointed() -> Task:
    return Task(DenseNet(), images(pixels=8), labels(), classes_loss)


class StyleNet(nn.Module):
    """A network that transfers a style, and frozen features that compare its images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
            nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3, 2), nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(), nn.Upsample(scale_factor=2, mode="nearest"),
            nn.ReflectionPad2d(1), nn.Conv2d(8, 3, 3),
        )  # fmt: skip
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features(self.net(x)), self.features(x)


def gram_matrix(y: torch.Tensor) -> torch.Tensor:
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


@program(
    "style transfer, Gram matrices of each image",
    "pytorch/examples",
    "https://github.com/pytorch/examples/tree/main/fast_neural_style",
)
def style_transfer() -> Task:
    style = torch.randn(6, 6)

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        of_style, of_content = outputs
        content = F.mse_loss(of_style, of_content, reduction="none").flatten(1).mean(1)
        return content + (gram_matrix(of_style) - style).square().flatten(1).mean(1)

    return Task(StyleNet(), images(), labels(), loss)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 4, 5), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
            nn.Conv2d(4, 6, 3), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
        )  # fmt: skip
        self.fc_loc = nn.Sequential(nn.Linear(24, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].weight.data.mul_(0.1)
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.conv, self.fc = nn.Conv2d(1, 4, 5), nn.Linear(144, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xs = self.localization(x).view(-1, 24)
        theta = self.fc_loc(xs).view(-1, 2, 3)
        x = F.grid_sample(x, F.affine_grid(theta, x.size(), False), align_corners=False)
        x = F.relu(F.max_pool2d(self.conv(x), 2)).view(-1, 144)
        return F.log_softmax(self.fc(x), dim=1)


@program(
    "spatial transformer",
    "PyTorch tutorials",
    "https://github.com/pytorch/tutorials/blob/main/intermediate_source/spatial_transformer_tutorial.py",
)
def spatial_transformer() -> Task:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(output, target, reduction="none")

    return Task(SpatialTransformer(), images(1), labels(10), loss)


class MaskedAutoencoder(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.pos = nn.Linear(48, width), nn.Parameter(torch.randn(1, 16, width))
        self.mask_token = nn.Parameter(torch.randn(1, 1, width))
        self.encoder, self.decoder = Attention(width), Attention(width)
        self.head = nn.Linear(width, 48)

    def random_masking(
        self, x: torch.Tensor, ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n, length, d = x.shape
        keep = int(length * (1 - ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        masked = torch.gather(x, 1, ids_shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :keep] = 0
        return masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches) + self.pos
        x, mask, restore = self.random_masking(x, 0.75)
        x = self.encoder(x) + x
        tokens = self.mask_token.repeat(x.shape[0], restore.shape[1] - x.shape[1], 1)
        x = torch.cat([x, tokens], dim=1)
        x = torch.gather(x, 1, restore.unsqueeze(-1).repeat(1, 1, x.shape[2])) + self.pos
        error = (self.head(self.decoder(x) + x) - patches).pow(2).mean(-1)
        return (error * mask).sum(1) / mask.sum(1)


@program(
    "masked autoencoder, random patches of each image",
    "facebookresearch/mae",
    "https://github.com/facebookresearch/mae/blob/main/models_mae.py",
)
def masked_autoencoder() -> Task:
    return Task(MaskedAutoencoder(), torch.randn(SIZE, 16, 48), labels(), lambda found, _: found)


class TransformNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 8, 1), nn.Conv1d(8, 16, 1)
        self.fc = nn.Linear(16, k * k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.fc(torch.max(x, 2, keepdim=True)[0].view(-1, 16))
        iden = torch.eye(self.k).flatten().view(1, self.k * self.k).repeat(x.shape[0], 1)
        return (x + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform, self.features = TransformNet(3), nn.Conv1d(3, 16, 1)
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trans = self.transform(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.features(x)).max(2)[0]
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1), trans


@program(
    "PointNet, alignment regulariser",
    "fxia22/pointnet.pytorch",
    "https://github.com/fxia22/pointnet.pytorch/blob/master/pointnet/model.py",
)
def pointnet() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        found, trans = outputs
        identity = torch.eye(trans.size()[1])[None]
        apart = torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2))
        return F.nll_loss(found, target, reduction="none") + 0.001 * apart

    return Task(PointNet(), torch.randn(SIZE, 3, 20), labels(), loss)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(588, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))

    def forward_once(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        return out.view(out.size()[0], -1)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.forward_once(one), self.forward_once(other)), 1)
        return torch.sigmoid(self.fc(both))


@program(
    "siamese pairs",
    "pytorch/examples",
    "https://github.com/pytorch/examples/tree/main/siamese_network",
)
def siamese_pairs() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(
            outputs.squeeze(-1), target.to(outputs.dtype), reduction="none"
        )

    return Task(Siamese(), {"one": images(1), "other": images(1)}, labels(2), loss)


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.PReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(216, 8),
            nn.PReLU(), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> Any:
        return tuple(F.normalize(self.net(each)) for each in (anchor, positive, negative))


@program(
    "triplet of each record",
    "adambielski/siamese-triplet",
    "https://github.com/adambielski/siamese-triplet/blob/master/losses.py",
)
def triplet() -> Task:
    def loss(outputs: Any, _: torch.Tensor) -> torch.Tensor:
        anchor, positive, negative = outputs
        near = (anchor - positive).pow(2).sum(1)
        far = (anchor - negative).pow(2).sum(1)
        return F.relu(near - far + 1.0)

    examples = {name: images() for name in ("anchor", "positive", "negative")}
    return Task(Triplet(), examples, labels(), loss)


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 8), nn.LayerNorm(8),
        )  # fmt: skip
        self.predictor = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 8))

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z1, z2 = self.encoder(x1), self.encoder(x2)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


@program(
    "SimSiam, two views of each record",
    "facebookresearch/simsiam",
    "https://github.com/facebookresearch/simsiam/blob/main/simsiam/builder.py",
)
def simsiam() -> Task:
    def loss(outputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        p1, p2, z1, z2 = outputs
        criterion = nn.CosineSimilarity(dim=1)
        return -(criterion(p1, z2) + criterion(p2, z1)) * 0.5

    return Task(SimSiam(), {"x1": images(), "x2": images()}, labels(), loss)


@program(
    "focal loss, label smoothing",
    "clcarwin/focal_loss_pytorch",
    "https://github.com/clcarwin/focal_loss_pytorch/blob/master/focalloss.py",
)
def focal_loss() -> Task:
    alpha = torch.linspace(0.2, 1.0, 5)

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = target.view(-1, 1)
        logpt = F.log_softmax(outputs, dim=-1).gather(1, target).view(-1)
        pt = logpt.detach().exp()
        logpt = logpt * alpha.gather(0, target.view(-1))
        smooth = F.cross_entropy(outputs, target.view(-1), label_smoothing=0.1, reduction="none")
        return -1 * (1 - pt) ** 2 * logpt + smooth

    model = nn.Sequential(
        nn.Flatten(), nn.Linear(768, 12), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(12, 5)
    )
    return Task(model, images(), labels(), loss)


class Rays(nn.Module):
    """A radiance field, and the colour of each ray through it."""

    def __init__(self) -> None:
        super().__init__()
        self.pts_linears = nn.ModuleList([nn.Linear(15, 16), nn.Linear(31, 16)])
        self.alpha, self.rgb = nn.Linear(16, 1), nn.Linear(16, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for freq in 2.0 ** torch.linspace(0.0, 1.0, 2):
            parts += [torch.sin(x * freq), torch.cos(x * freq)]
        return torch.cat(parts, -1)

    def forward(self, rays: torch.Tensor) -> torch.Tensor:
        origin, direction = rays[..., :3], rays[..., 3:]
        t_vals = torch.linspace(0.0, 1.0, steps=8).expand([rays.shape[0], 8])
        mids = 0.5 * (t_vals[..., 1:] + t_vals[..., :-1])
        upper, lower = (
            torch.cat([mids, t_vals[..., -1:]], -1),
            torch.cat([t_vals[..., :1], mids], -1),
        )
        z_vals = lower + (upper - lower) * torch.rand(t_vals.shape)
        points = origin[..., None, :] + direction[..., None, :] * z_vals[..., :, None]
        x = self.embed(points)
        h = F.relu(self.pts_linears[0](x))
        h = F.relu(self.pts_linears[1](torch.cat([x, h], -1)))
        dists = z_vals[..., 1:] - z_vals[..., :-1]
        dists = torch.cat([dists, torch.tensor([1e10]).expand(dists[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-F.softplus(self.alpha(h)[..., 0]) * dists)
        ones = torch.ones((alpha.shape[0], 1))
        weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return torch.sum(weights[..., None] * torch.sigmoid(self.rgb(h)), -2)


@program(
    "NeRF, stratified samples of each ray",
    "yenchenlin/nerf-pytorch",
    "https://github.com/yenchenlin/nerf-pytorch/blob/master/run_nerf.py",
)
def nerf() -> Task:
    return Task(Rays(), torch.randn(SIZE, 6), torch.rand(SIZE, 3), squared_error)
