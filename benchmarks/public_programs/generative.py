"""Generative models, and models of differential equations."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_programs.program import Task, program
from benchmarks.public_programs.vision import SIZE, images, labels, squared_error


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def reparameterize(self, mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h1 = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@program("VAE", "pytorch/examples", "https://github.com/pytorch/examples/tree/main/vae")
def vae() -> Task:
    def loss(outputs: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        recon, mu, logvar = outputs
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="none").sum(1)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
        return bce + kld

    pixels = torch.rand(SIZE, 1, 8, 8)
    return Task(Vae(), pixels, pixels, loss)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 20) * 0.2)
        self.encoder_bias = nn.Parameter(torch.zeros(8))
        self.decoder_bias = nn.Parameter(torch.zeros(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = torch.sigmoid(F.linear(x, self.weight, self.encoder_bias))
        return F.linear(encoded, self.weight.t(), self.decoder_bias)


@program(
    "autoencoder with tied weights",
    "lisa-lab/DeepLearningTutorials",
    "https://github.com/lisa-lab/DeepLearningTutorials/blob/master/code/dA.py",
)
def tied_autoencoder() -> Task:
    rows = torch.randn(SIZE, 20)
    return Task(TiedAutoencoder(), rows, rows, squared_error)


class GanDiscriminator(nn.Module):
    """A discriminator, and a frozen generator that makes one image beside each real one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 8),
            nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.generator = nn.Sequential(nn.Linear(5, 64), nn.Tanh()).requires_grad_(False)

    def forward(self, img: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.randn(img.shape[0], 5)
        gen = self.generator(z).view(img.shape[0], 1, 8, 8).detach()
        return self.model(img.view(img.size(0), -1)), self.model(gen.view(gen.size(0), -1))


@program(
    "GAN discriminator",
    "eriklindernoren/PyTorch-GAN",
    "https://github.com/eriklindernoren/PyTorch-GAN/blob/master/implementations/gan/gan.py",
)
def gan_discriminator() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        real, fake = outputs
        adversarial = nn.BCELoss(reduction="none")
        valid, not_valid = torch.ones_like(real), torch.zeros_like(fake)
        return ((adversarial(real, valid) + adversarial(fake, not_valid)) / 2).squeeze(1)

    return Task(GanDiscriminator(), images(1, 8), labels(), loss)


class WassersteinCritic(nn.Module):
    """A critic, with the penalty of its gradient between each real and its fake image."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(64, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def gradient_penalty(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = self.critic(interpolates)
        gradients = torch.autograd.grad(
            outputs=scores, inputs=interpolates, grad_outputs=torch.ones_like(scores),
            create_graph=True, retain_graph=True, only_inputs=True,
        )[0]  # fmt: skip
        return (gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        apart = self.critic(fake) - self.critic(real)
        return apart.squeeze(1) + 10 * self.gradient_penalty(real, fake)


@program(
    "WGAN critic, gradient penalty by autograd.grad",
    "eriklindernoren/PyTorch-GAN",
    "https://github.com/eriklindernoren/PyTorch-GAN/blob/master/implementations/wgan_gp/wgan_gp.py",
)
def wgan_gradient_penalty() -> Task:
    examples = {"real": torch.randn(SIZE, 64), "fake": torch.randn(SIZE, 64)}
    return Task(WassersteinCritic(), examples, labels(), lambda found, _: found)


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.dim // 2
        emb = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time, outside * 2))
        self.proj, self.norm = nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside)
        self.res_conv = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time_emb: torch.Tensor) -> torch.Tensor:
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm(self.proj(x)) * (scale + 1) + shift)
        return h + self.res_conv(x)


class LinearAttention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = (
            nn.Conv2d(width, 3 * width, 1, bias=False),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, h, w = x.shape
        q, k, v = (each.view(b, self.heads, -1, h * w) for each in self.to_qkv(x).chunk(3, dim=1))
        q, k = q.softmax(dim=-2), k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.to_out(out.reshape(b, -1, h, w))


class Diffusion(nn.Module):
    """A U-Net that finds the noise that was added to each image at a time of its own."""

    alphas_cumprod: torch.Tensor

    def __init__(self, width: int = 8, steps: int = 20) -> None:
        super().__init__()
        self.steps = steps
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 16)
        )
        self.init_conv = nn.Conv2d(1, width, 7, padding=3)
        self.down, self.attn = ResnetBlock(width, width, 16), LinearAttention(width)
        self.downsample = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.mid = ResnetBlock(2 * width, 2 * width, 16)
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1)
        )
        self.up, self.final = ResnetBlock(2 * width, width, 16), nn.Conv2d(width, 1, 1)
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))

    def predict(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        t = self.time_mlp(time)
        x = self.init_conv(x)
        h = self.down(x, t)
        h = self.attn(h) + h
        mid = self.mid(self.downsample(h), t)
        return self.final(self.up(torch.cat((self.upsample(mid), h), dim=1), t))

    def forward(self, x_start: torch.Tensor) -> torch.Tensor:
        b = x_start.shape[0]
        t = torch.randint(0, self.steps, (b,), device=x_start.device).long()
        noise = torch.randn_like(x_start)
        a = self.alphas_cumprod.gather(-1, t).reshape(b, 1, 1, 1)
        x = a.sqrt() * x_start + (1 - a).sqrt() * noise
        loss = F.mse_loss(self.predict(x, t), noise, reduction="none")
        return loss.flatten(1).mean(1)


@program(
    "diffusion U-Net with time embedding",
    "lucidrains/denoising-diffusion-pytorch",
    "https://github.com/lucidrains/denoising-diffusion-pytorch/blob/main/denoising_diffusion_pytorch/denoising_diffusion_pytorch.py",
)
def diffusion() -> Task:
    return Task(Diffusion(), images(1, 8), labels(), lambda found, _: found)


class RealNvp(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()

        def net(*last: nn.Module) -> nn.Module:
            return nn.Sequential(nn.Linear(width, 12), nn.LeakyReLU(), nn.Linear(12, width), *last)

        self.s = nn.ModuleList([net(nn.Tanh()) for _ in range(3)])
        self.t = nn.ModuleList([net() for _ in range(3)])
        even = torch.arange(width) % 2
        self.register_buffer("mask", torch.stack([even, 1 - even, even]).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s = self.s[i](z_) * (1 - self.mask[i])
            t = self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        prior = torch.distributions.MultivariateNormal(torch.zeros(6), torch.eye(6))
        return prior.log_prob(z) + log_det


@program(
    "normalising flow (real NVP)",
    "senya-ashukha/real-nvp-pytorch",
    "https://github.com/senya-ashukha/real-nvp-pytorch/blob/master/real-nvp-pytorch.ipynb",
)
def normalizing_flow() -> Task:
    return Task(RealNvp(), torch.randn(SIZE, 6), labels(), lambda found, _: -found)


class MixtureDensity(nn.Module):
    def __init__(self, mixtures: int = 4) -> None:
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(3, 12), nn.Tanh())
        self.z_pi, self.z_mu = nn.Linear(12, mixtures), nn.Linear(12, mixtures)
        self.z_sigma = nn.Linear(12, mixtures)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z_h = self.z_h(x)
        return F.softmax(self.z_pi(z_h), -1), torch.exp(self.z_sigma(z_h)), self.z_mu(z_h)


@program(
    "mixture density network",
    "hardmaru/pytorch_notebooks",
    "https://github.com/hardmaru/pytorch_notebooks/blob/master/mixture_density_networks.ipynb",
)
def mixture_density() -> Task:
    def loss(outputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
        pi, sigma, mu = outputs
        result = (y.unsqueeze(1).expand_as(mu) - mu) * torch.reciprocal(sigma)
        result = (
            torch.exp(-0.5 * (result * result)) * torch.reciprocal(sigma) / math.sqrt(2 * math.pi)
        )
        return -torch.log(torch.sum(result * pi, dim=1) + 1e-6)

    return Task(MixtureDensity(), torch.randn(SIZE, 3), torch.randn(SIZE), loss)


class VectorQuantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, 1, 1))
        self.embedding = nn.Embedding(7, 4)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 1, 3, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, 4)
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True) + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.embedding.weight.t())
        )  # fmt: skip
        indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], 7, device=x.device)
        encodings.scatter_(1, indices, 1)
        quantized = torch.matmul(encodings, self.embedding.weight).view(inputs.shape)
        latent = (quantized.detach() - inputs).square() + (quantized - inputs.detach()).square()
        quantized = inputs + (quantized - inputs).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2).contiguous()), latent.flatten(1).mean(1)


@program(
    "VQ-VAE, straight-through estimator",
    "zalandoresearch/pytorch-vq-vae",
    "https://github.com/zalandoresearch/pytorch-vq-vae/blob/master/vq-vae.ipynb",
)
def vq_vae() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return squared_error(outputs[0], x) + outputs[1]

    x = images(1, 8)
    return Task(VectorQuantizer(), x, x, loss)


class MaskedConv2d(nn.Conv2d):
    mask: torch.Tensor

    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mask", torch.ones_like(self.weight))
        middle = self.kernel_size[0] // 2
        self.mask[:, :, middle, middle + (kind == "B") :] = 0
        self.mask[:, :, middle + 1 :] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


@program(
    "PixelCNN, masked convolutions",
    "jzbontar/pixelcnn-pytorch",
    "https://github.com/jzbontar/pixelcnn-pytorch/blob/master/main.py",
)
def pixel_cnn() -> Task:
    model = nn.Sequential(
        MaskedConv2d("A", 1, 8, 5, padding=2), nn.ReLU(), MaskedConv2d("B", 8, 8, 5, padding=2),
        nn.ReLU(), nn.Conv2d(8, 16, 1),
    )  # fmt: skip

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        levels = (target[:, 0] * 15).long()
        return F.cross_entropy(outputs, levels, reduction="none").flatten(1).sum(1)

    x = torch.rand(SIZE, 1, 8, 8)
    return Task(model, x, x, loss)


class Pinn(nn.Module):
    """A network of place and time, and how far it is from solving Burgers' equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
        )

    def net_u(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, t], dim=1))

    def net_f(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        u = self.net_u(x, t)
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=ones, retain_graph=True, create_graph=True)[
            0
        ]
        return u_t + u * u_x - 0.01 / math.pi * u_xx

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = points[:, 0:1].clone().requires_grad_(True)
        t = points[:, 1:2].clone().requires_grad_(True)
        return self.net_u(x, t), self.net_f(x, t)


@program(
    "physics-informed network, autograd.grad in the model",
    "jayroxis/PINNs",
    "https://github.com/jayroxis/PINNs",
)
def physics_informed() -> Task:
    def loss(outputs: tuple[torch.Tensor, torch.Tensor], u: torch.Tensor) -> torch.Tensor:
        u_pred, f_pred = outputs
        return ((u - u_pred) ** 2 + f_pred**2).squeeze(1)

    return Task(Pinn(), torch.rand(SIZE, 2), torch.randn(SIZE, 1), loss)


class HamiltonianNet(nn.Module):
    """The derivatives of a learned Hamiltonian at each point, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1, bias=False))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        gradients = torch.func.vmap(torch.func.grad(lambda x: self.net(x).sum()))(points)
        return torch.stack([gradients[:, 1], -gradients[:, 0]], 1)


@program(
    "Hamiltonian network, torch.func.grad in the model",
    "greydanus/hamiltonian-nn",
    "https://github.com/greydanus/hamiltonian-nn/blob/master/hnn.py",
)
def hamiltonian() -> Task:
    return Task(HamiltonianNet(), torch.randn(SIZE, 2), torch.randn(SIZE, 2), squared_error)


class Siren(nn.Module):
    def __init__(
        self, inside: int, outside: int, omega_0: float = 30.0, *, first: bool = False
    ) -> None:
        super().__init__()
        self.omega_0, self.linear = omega_0, nn.Linear(inside, outside)
        limit = 1 / inside if first else math.sqrt(6 / inside) / omega_0
        with torch.no_grad():
            self.linear.weight.uniform_(-limit, limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.omega_0 * self.linear(x))


@program("SIREN, one pixel a record", "vsitzmann/siren", "https://github.com/vsitzmann/siren")
def siren() -> Task:
    model = nn.Sequential(Siren(2, 12, first=True), Siren(12, 12), nn.Linear(12, 3))
    return Task(model, 2 * torch.rand(SIZE, 2) - 1, torch.rand(SIZE, 3), squared_error)


class NeuralOde(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))

    def func(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y**3) * torch.cos(t)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        times, found = torch.linspace(0.0, 1.0, 4), [y]
        for t, after in pairwise(times):
            dt = after - t
            k1 = self.func(t, y)
            k2 = self.func(t + dt / 3, y + dt * k1 / 3)
            k3 = self.func(t + dt * 2 / 3, y + dt * (k2 - k1 / 3))
            k4 = self.func(after, y + dt * (k1 - k2 + k3))
            y = y + (k1 + 3 * (k2 + k3) + k4) * dt * 0.125
            found.append(y)
        return torch.stack(found, dim=1)


@program(
    "neural ODE, fixed steps", "rtqichen/torchdiffeq", "https://github.com/rtqichen/torchdiffeq"
)
def neural_ode() -> Task:
    return Task(NeuralOde(), torch.randn(SIZE, 2), torch.randn(SIZE, 4, 2), squared_error)
