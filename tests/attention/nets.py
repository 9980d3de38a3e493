"""Small transformers: with torch's attention, with fused and with plain attention, and with shifted windows."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets import Function

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return F.dropout(weights, 0.5, training=False) @ v


def by_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5, dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = nn.Softmax(-1)(q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1))
    return (v.transpose(-2, -1) @ weights.transpose(-2, -1)).transpose(-2, -1)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv, self.softmax = nn.Linear(width, 3 * width), nn.Softmax(-1)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        n, length, width = x.shape
        return tuple(
            self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x)).transpose(1, 2).flatten(2)


def ours(width: int, heads: int, need_weights: bool) -> nn.Module:
    """nn.MultiheadAttention as self-attention; it may give its weights too, on which another kernel runs."""
    inner = nn.MultiheadAttention(width, heads, batch_first=True)
    return Function(lambda net, x: net.inner(x, x, x, need_weights=need_weights)[0], inner=inner)


class Vit(nn.Module):
    """Patches of 4x4, a class token if asked for, two blocks of attention, and four classes."""

    def __init__(self, attention: Callable[[], nn.Module], class_token: bool = True, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width)) if class_token else None
        self.blocks = nn.Sequential(*(block(attention(), width) for _ in range(2)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.token is None:
            return self.head(self.blocks(tokens).mean(1))
        return self.head(self.blocks(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1))[:, 0])


def block(attention: nn.Module, width: int) -> nn.Module:
    return Function(lambda net, x: x + net.attention(net.norm(x)), norm=nn.LayerNorm(width), attention=attention)


def vit(attend: Attend = fused, **options: Any) -> Vit:
    torch.manual_seed(0)
    net = Vit(lambda: SelfAttention(8, 2, attend), **options)
    for name, parameter in net.named_parameters():
        if "qkv" in name:
            nn.init.normal_(parameter, std=0.8)
    return net.eval()


def vit_of_torch(need_weights: bool, **options: Any) -> Vit:
    torch.manual_seed(0)
    return Vit(lambda: ours(8, 2, need_weights), **options).eval()


class Windows(nn.Module):
    """Attention within windows of 4x4 positions, shifted by two, of a map that is padded to whole windows."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.attention = shift, SelfAttention(8, 2, plain)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % 4, 0, -height % 4))
        _, h, w, c = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = x.view(1, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        x = self.attention(windows).view(1, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(1, h, w, c)
        return torch.roll(x, (self.shift, self.shift), (1, 2))[:, :height, :width]


def swin() -> nn.Module:
    """A map of 6x10 positions in shifted windows, merged to 3x5 positions, in windows again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(net.patches(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return net.second(net.merge(x)).mean((1, 2))

    torch.manual_seed(0)
    patches, first, merge, second = nn.Conv2d(3, 8, 2, 2), Windows(2), nn.Linear(32, 8), Windows(0)
    return Function(forward, patches=patches, first=first, merge=merge, second=second).eval()


def picture(height: int = 16, width: int = 24) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1))
