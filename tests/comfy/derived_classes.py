"""Classes that no row describes: a small one that can be changed in ways no rows may be derived for, and two new ones.

The new ones are written from what was published of MOSS-Image (42 single-stream blocks, one shared modulation, 6
linears a block, a gated feed-forward, rotary positions of 4 axes) and of FLUX 3 (5 blocks for each stream, then 28
joint ones, with queries, keys, values and feed-forward apart). Their widths are tiny.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import optimized_attention
from torch import nn

WIDTH, HEADS, TEXT = 32, 4, 64
Rows = torch.Tensor


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions. x: [batch, rows, heads, width], angles: [batch, rows, width / 2]"""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2)


def _positions(ids: torch.Tensor) -> torch.Tensor:
    """Angles of rows by their place along each axis. [batch, rows, axes] to [batch, rows, width / 2]"""
    each = WIDTH // HEADS // 2 // ids.shape[-1]
    scales = 0.1 ** torch.arange(each, device=ids.device)
    return (ids[..., None].float() * scales).flatten(-2)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Rows, angles: torch.Tensor, options: dict[str, Any]) -> Rows:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = (_rotated(F.rms_norm(each, each.shape[-1:]), angles).flatten(-2) for each in (q, k))
        return self.out(optimized_attention(q, k, v.flatten(-2), HEADS, transformer_options=options))


class _Block(nn.Module):
    """Modulated attention and a gated feed-forward of three times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = _Attention()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Rows, vec: torch.Tensor, angles: torch.Tensor, transformer_options: Any = None) -> Rows:
        scale, gate, scale_2, gate_2 = vec.chunk(4, -1)
        x = x + gate * self.attn(F.layer_norm(x, x.shape[-1:]) * (1 + scale), angles, transformer_options)
        gated, given = self.up(F.layer_norm(x, x.shape[-1:]) * (1 + scale_2)).chunk(2, -1)
        return x + gate_2 * self.down(torch.tanh(gated) * torch.sigmoid(gated) * given)


class _Model(nn.Module):
    axes = 4

    def __init__(self, channels: int = 4, text: int = TEXT, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.img_in, self.txt_in = nn.Linear(channels * patch**2, WIDTH), nn.Linear(text, WIDTH)
        self.time_in, self.modulation = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(WIDTH, channels * patch**2)
        self.dtype = torch.float32

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, transformer_options: Any = None, **_: Any
    ) -> torch.Tensor:
        batch, channels, height, width = x.shape
        x = F.pad(x, (0, -width % self.patch, 0, -height % self.patch))
        rows, columns = x.shape[-2] // self.patch, x.shape[-1] // self.patch
        img = self.img_in(F.pixel_unshuffle(x, self.patch).flatten(2).mT)
        txt = self.txt_in(context)
        angles = torch.arange(1, 9, device=x.device) * timestep[:, None].float()
        vec = self.modulation(F.silu(self.time_in(torch.cos(angles))))[:, None]
        ids = torch.zeros(rows, columns, self.axes, device=x.device)
        ids[..., 0], ids[..., -2], ids[..., -1] = 0, torch.arange(rows)[:, None], torch.arange(columns)[None]
        ids = ids.flatten(0, 1)[None].expand(batch, -1, -1)
        of_text = torch.arange(txt.shape[1], device=x.device)[None, :, None].expand(batch, -1, self.axes)
        img = self.of_blocks(img, txt, vec, _positions(ids), _positions(of_text), transformer_options)
        img = self.out(F.layer_norm(img, img.shape[-1:])).mT.unflatten(-1, (rows, columns))
        return F.pixel_shuffle(img, self.patch)[..., :height, :width]

    def of_blocks(
        self, img: Rows, txt: Rows, vec: torch.Tensor, at: torch.Tensor, text_at: torch.Tensor, options: Any
    ) -> Rows:
        raise NotImplementedError


class MossLike(_Model):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.layers = nn.ModuleList(_Block() for _ in range(42))

    def of_blocks(self, img: Rows, txt: Rows, vec: Any, at: Any, text_at: Any, options: Any) -> Rows:
        x, angles = torch.cat([txt, img], 1), torch.cat([text_at, at], 1)
        for block in self.layers:
            x = block(x, vec, angles, transformer_options=options)
        return x[:, txt.shape[1] :]


class Flux3Like(_Model):
    """Blocks of each stream before the joint ones."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.img_blocks, self.txt_blocks = (nn.ModuleList(_Block() for _ in range(5)) for _ in range(2))
        self.joint_blocks = nn.ModuleList(_Block() for _ in range(28))

    def of_blocks(self, img: Rows, txt: Rows, vec: Any, at: Any, text_at: Any, options: Any) -> Rows:
        for of_img, of_txt in zip(self.img_blocks, self.txt_blocks, strict=True):
            img, txt = of_img(img, vec, at, options), of_txt(txt, vec, text_at, options)
        x, angles = torch.cat([txt, img], 1), torch.cat([text_at, at], 1)
        for block in self.joint_blocks:
            x = block(x, vec, angles, options)
        return x[:, txt.shape[1] :]


UNSEEN: dict[str, Callable[..., nn.Module]] = {"moss": MossLike, "flux3": Flux3Like}


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * (parameter.shape[-1] ** -0.5 if noise.ndim > 1 else 0.2)
    return model.requires_grad_(False).eval()


def in_bfloat16(value: Any) -> Any:
    if isinstance(value, dict):
        is_wide = lambda each: isinstance(each, torch.Tensor) and each.ndim > 1  # noqa: E731
        return {name: each.bfloat16() if is_wide(each) else each for name, each in value.items()}
    for module in value.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    return value.bfloat16()


@dataclass(frozen=True)
class Mutation:
    """What a block does beside what it should.

    Args:
        order: of keys and values. mix: of what comes out. mask: for so many rows. from_rows: in larger forwards alone.
        until: at no higher noise. is_last_alone: whether only the last block does it.
        is_hidden: whether attention is not ComfyUI's.
    """

    order: Callable[[Rows, Rows], tuple[Rows, Rows]] | None = None
    mix: Callable[[Rows], Rows] | None = None
    mask: Callable[[int], torch.Tensor] | None = None
    from_rows: int = 0
    until: float = 1.0
    is_last_alone: bool = False
    is_hidden: bool = False


def _distance(count: int) -> torch.Tensor:
    rows = torch.arange(count)
    return (rows[:, None] - rows[None]).float()


def _alike(change: Callable[[Rows], Rows]) -> Callable[[Rows, Rows], tuple[Rows, Rows]]:
    return lambda k, v: (change(k), change(v))


def _sorted(k: Rows, v: Rows) -> tuple[Rows, Rows]:
    order = k[..., :1].argsort(1)
    return torch.take_along_dim(k, order, 1), torch.take_along_dim(v, order, 1)


def _first_half(count: int) -> torch.Tensor:
    mask = torch.zeros(count, count)
    mask[:, count // 2 :] = -1.0
    return mask


def _twice(*rows: slice) -> Callable[[Rows], Rows]:
    def change(x: Rows) -> Rows:
        x = x.clone()
        x[:, rows[0]] = x[:, rows[0]] * 2
        return x

    return change


_ALONG = {"dim": 1, "keepdim": True}
MUTATIONS: dict[str, Mutation] = {
    "keys backwards": Mutation(order=_alike(lambda x: x.flip(1))),
    "keys rolled": Mutation(order=_alike(lambda x: x.roll(1, 1))),
    "keys even, then odd": Mutation(order=_alike(lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1))),
    "keys in swapped halves": Mutation(order=_alike(lambda x: x.roll(x.shape[1] // 2, 1))),
    "keys sorted": Mutation(order=_sorted),
    "the row before": Mutation(mix=lambda x: x + 0.3 * x.roll(1, 1)),
    "the row behind": Mutation(mix=lambda x: x + 0.3 * x.roll(-1, 1)),
    "the row before, in the last block": Mutation(mix=lambda x: x + 0.3 * x.roll(1, 1), is_last_alone=True),
    "the row before, at little noise": Mutation(mix=lambda x: x + 0.3 * x.roll(1, 1), until=0.1),
    "attention that nobody sees": Mutation(is_hidden=True),
    "the mean of all rows": Mutation(mix=lambda x: x - x.mean(**_ALONG)),
    "the largest of all rows": Mutation(mix=lambda x: x + x.amax(**_ALONG)),
    "a norm of all rows": Mutation(mix=lambda x: x * F.normalize(x, dim=1)),
    "a running sum": Mutation(mix=lambda x: x + 0.1 * x.cumsum(1)),
    "a convolution": Mutation(mix=lambda x: x + F.avg_pool1d(x.mT, 3, 1, 1).mT),
    "attention of its own": Mutation(mix=lambda x: x + (x @ x.mT).softmax(-1) @ x),
    "a narrow window": Mutation(mask=lambda n: (_distance(n).abs() > 2) * -1e4),
    "a window that small pictures do not fill": Mutation(mask=lambda n: (_distance(n).abs() > 60) * -1e4),
    "rows before alone": Mutation(mask=lambda n: (_distance(n) < 0) * -1e4),
    "a bias by distance": Mutation(mask=lambda n: -0.3 * _distance(n).abs()),
    "a bias of the second half": Mutation(mask=_first_half),
    "the ninth row": Mutation(mix=_twice(slice(8, 9))),
    "the last row": Mutation(mix=_twice(slice(-1, None))),
    "every third row": Mutation(mix=_twice(slice(None, None, 3))),
    "positions counted inside": Mutation(
        mix=lambda x: x + torch.outer(torch.arange(x.shape[1]).sin(), torch.linspace(-1, 1, WIDTH)).to(x)
    ),
    "the number of rows": Mutation(mix=lambda x: x * (1 + 0.3 * torch.tensor(float(x.shape[1])).log())),
}
LATE = 0.51, 0.99  # timesteps of which no small picture is
SEEN_LATER = Mutation(mix=MUTATIONS["the row before"].mix, from_rows=60)  # no small picture shows it


class _Mutant(nn.Module):
    def __init__(self, mutation: Mutation) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.__dict__["mutation"] = mutation

    def forward(self, img: Rows, txt: Rows, pe: Rows, vec: torch.Tensor, options: Any) -> tuple[Rows, Rows]:
        both = torch.cat([txt, img], 1)
        q, k, v = (self.qkv(F.layer_norm(both, both.shape[-1:])) + pe.repeat(1, 1, 3)).chunk(3, -1)
        change, mask = self.mutation, None
        is_on = both.shape[1] >= change.from_rows and getattr(self, "_noise", 0.0) <= change.until
        if change.order is not None:
            k, v = change.order(k, v)
        if change.mask is not None:
            mask = change.mask(both.shape[1]).to(both)[None, None]
        if change.is_hidden:
            found = F.scaled_dot_product_attention(q, k, v)
        else:
            found = optimized_attention(q, k, v, HEADS, mask=mask, transformer_options=options)
        both = both + vec * self.out(found)
        if change.mix is not None and is_on:
            both = change.mix(both)
        return both[:, txt.shape[1] :], both[:, : txt.shape[1]]


class Mutated(_Model):
    """Text and picture in one attention; right by tokens without a mutation."""

    axes = 4

    def __init__(self, mutation: Mutation = Mutation(), **sizes: Any) -> None:
        super().__init__(**sizes)
        front = Mutation() if mutation.is_last_alone else mutation
        self.blocks = nn.ModuleList(map(_Mutant, (front, front, mutation)))
        self._tells_noise = mutation.until < 1

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, transformer_options: Any = None, **_: Any
    ) -> torch.Tensor:
        for block in self.blocks if self._tells_noise else ():
            block._noise = float(timestep.max())
        return super().forward(x, timestep, context, transformer_options)

    def of_blocks(self, img: Rows, txt: Rows, vec: Any, at: Any, text_at: Any, options: Any) -> Rows:
        pe = torch.cat([text_at, at], 1).sin().repeat(1, 1, WIDTH // at.shape[-1])
        for block in self.blocks:
            img, txt = block(img, txt, pe, vec[..., :WIDTH], options)
        return img


class Late(Mutated):
    """Mixes rows between the first and the last steps alone."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, **given: Any) -> torch.Tensor:
        options = {**(given.pop("transformer_options", None) or {}), "now": float(timestep.max())}
        return super().forward(x, timestep, context, transformer_options=options, **given)

    def of_blocks(self, img: Rows, txt: Rows, vec: Any, at: Any, text_at: Any, options: Any) -> Rows:
        pe = torch.cat([text_at, at], 1).sin().repeat(1, 1, WIDTH // at.shape[-1])
        is_late = LATE[0] < options["now"] < LATE[1]
        for block in self.blocks:
            img, txt = block(img + img.roll(1, 1) * is_late, txt, pe, vec[..., :WIDTH], options)
        return img


class Keeping(Mutated):
    """Keeps something of every forward."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_buffer("kept", torch.zeros(3))
        self._texts: dict[str, Any] = {"of": []}

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.kept.fill_(7)
        self.kept = self.kept + 1
        self._texts["of"].append(context)
        return super().forward(x, timestep, context, **kwargs)
