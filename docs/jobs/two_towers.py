"""Two towers, contrastive: which answer belongs to which question?"""

import torch
from torch import nn

import trainfit


class Pairs(torch.utils.data.Dataset):
    """A hidden vector seen through two different linear maps."""

    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(7)
        maps = torch.randn(2, 8, 24, generator=draws)
        hidden = torch.randn(count, 8, generator=draws.manual_seed(seed))
        self.questions, self.answers = hidden @ maps[0], hidden @ maps[1]

    def __len__(self):
        return len(self.questions)

    def __getitem__(self, at):
        return {"question": self.questions[at], "answer": self.answers[at]}


class TwoTowers(trainfit.Job):
    metric = "recall_at_1"
    indivisible = True  # every answer of a step is a wrong one for all other questions

    class Config:
        width: int = trainfit.tunable(16, choices=[16, 32])
        momentum: float = 0.9
        lr: float = 0.05
        effective_batch: int = 64
        epochs: float = 6.0

    def data(self, split):
        return Pairs(*{"train": (512, 0), "validation": (64, 1), "test": (64, 2)}[split])

    def model(self):
        return nn.ModuleList(nn.Linear(24, self.config.width) for _ in range(2))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.config.lr, momentum=self.config.momentum)

    def scores(self, model, batch):
        towers = zip(model, (batch["question"], batch["answer"]), strict=True)
        question, answer = (nn.functional.normalize(tower(x), dim=-1) for tower, x in towers)
        return question @ answer.T * 10

    def loss(self, model, batch):
        scores = self.scores(model, batch)
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    def evaluate(self, model, batches):
        found = [self.scores(model, batch).argmax(1).cpu() for batch in batches]
        right = [(best == torch.arange(len(best))).float() for best in found]
        return {"recall_at_1": float(torch.cat(right).mean())}
