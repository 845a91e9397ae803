"""Classify small images: which quarter of the picture is the brightest?"""

import torch
from torch import nn

import trainfit


class Pictures(torch.utils.data.Dataset):
    """Noise with one bright quarter, made from a seed."""

    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (count,), generator=draws)
        self.images = torch.rand(count, 1, 16, 16, generator=draws)
        for image, label in zip(self.images, self.labels, strict=True):
            top, left = 8 * (label // 2), 8 * (label % 2)
            image[:, top : top + 8, left : left + 8] += 0.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        return self.images[at], self.labels[at]


class Images(trainfit.Job):
    metric = "accuracy"

    class Config:
        width: int = 16
        lr: float = trainfit.tunable(1e-2, low=1e-3, high=3e-2, log=True)
        effective_batch: int = 32
        epochs: float = 4.0

    def data(self, split):
        sizes = {"train": (512, 0), "validation": (128, 1), "test": (128, 2)}
        return Pictures(*sizes[split])

    def model(self):
        width = self.config.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(8),
            nn.Flatten(),
            nn.Linear(4 * width, 4),
        )

    def loss(self, model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels, reduction="none")

    def evaluate(self, model, batches):
        right = [(model(images).argmax(1) == labels).float() for images, labels in batches]
        return {"accuracy": float(torch.cat(right).mean())}

    def predict(self, model, item):
        return {"quarter": int(model(torch.tensor(item).reshape(1, 1, 16, 16)).argmax())}
