"""Recordings for benchmarks/wire.py where none are at hand: ResNet-20 trained on digits by two clients.

Each client holds half of the labels. For every sparsity there are two recordings of the last round: `known`,
where the mask is that of the first round's magnitudes, as a server can tell; and `own`, where training is
dense and the client's mask is that of its own magnitudes, which a server can only guess.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SPARSITIES = (0.5, 0.8, 0.9, 0.95)
LOCAL_STEPS, BATCH, RATE = 5, 64, 1e-3


class Block(nn.Module):
    """Two convolutions and a parameter-free shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, (outputs - inputs) // 2

    def forward(self, x):
        """The block's output."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(
            y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))
        )


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for number in range(3):
            layers.append(Block(width, outputs, 1 if number else stride))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def entries(model):
    return [(name, t) for name, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()]


def flat(model):
    return torch.cat([t.detach().flatten() for _, t in entries(model)])


def split(model, vector):
    pieces = vector.split([t.numel() for _, t in entries(model)])
    return {name: piece.view_as(t) for (name, t), piece in zip(entries(model), pieces, strict=True)}


def train(model, start, mask, images, labels, draws):
    """Local steps from `start` with the cut weights held at zero; the trained vector."""
    for (_, t), value in zip(entries(model), split(model, start).values(), strict=True):
        t.data.copy_(value)
    masks = split(model, mask)
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    model.train()
    for _ in range(LOCAL_STEPS):
        batch = torch.randint(len(labels), (BATCH,), generator=draws)
        optimiser.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimiser.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(masks[name])
    return flat(model)


def largest(vector, prunable, sparsity):
    """Everything dense, and of the prunable the largest magnitudes."""
    keep = ~prunable
    places = torch.nonzero(prunable)[:, 0]
    order = torch.argsort(-vector[places].abs(), stable=True)
    keep[places[order[: round((1 - sparsity) * len(places))]]] = True
    return keep


def make(folder: Path, rounds: int) -> None:
    """Write the recordings."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    images = images.repeat(1, 3, 1, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
    labels = torch.tensor(targets)
    halves = [labels < 5, labels >= 5]
    for sparsity in SPARSITIES:
        for own in (False, True):
            torch.manual_seed(0)
            draws = torch.Generator().manual_seed(0)
            model = resnet20()
            flags = [name.endswith("weight") and t.dim() > 1 for name, t in entries(model)]
            sizes = [t.numel() for _, t in entries(model)]
            prunable = torch.repeat_interleave(torch.tensor(flags), torch.tensor(sizes))
            average = flat(model)
            mask = torch.ones_like(prunable) if own else largest(average, prunable, sparsity)
            for _ in range(rounds):
                reference = average
                start = torch.where(mask, reference, 0.0)
                trained = [train(model, start, mask, images[h], labels[h], draws) for h in halves]
                average = (trained[0] + trained[1]) / 2
            vector, predicted = trained[0], mask
            if own:
                mask, predicted = (largest(v, prunable, sparsity) for v in (vector, reference))
            np.savez(
                folder / f"{'own' if own else 'known'}{round(100 * sparsity)}.npz",
                reference=reference.numpy(),
                vector=torch.where(mask, vector, 0.0).numpy(),
                mask=mask.numpy(),
                predicted=predicted.numpy(),
                names=np.array([name for name, _ in entries(model)]),
                sizes=np.array(sizes),
                prunable=np.array(flags),
                shapes=np.array(["x".join(map(str, t.shape)) for _, t in entries(model)]),
            )
            print(f"trained {rounds} rounds at {sparsity:.0%}{', own mask' if own else ''}", flush=True)
