"""Models and steps as users write them: each is estimated, or refused in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask
from trainfit.planning.estimator.meta_device import on_meta

HERE = Path(__file__).stem
WIDTH, ROWS = 64, 16
HOPPER = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)


def asked(factory: str, **arguments: Any) -> Answer:
    task = TaskSpec(factory=f"{HERE}:{factory}", arguments=arguments)
    return ask([Request(task=task, targets=(HOPPER,))])[0]


def estimated(factory: str, **arguments: Any) -> Answer:
    found = asked(factory, **arguments)
    assert (found.error, found.refused) == (None, None)
    return found


def plain(clears: str = "after") -> Any:
    """Layers without a bias; gradients are cleared before the step, as most loops do, or after."""
    built = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))

    def make_step(model: nn.Module) -> Callable[[], None]:
        adam = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.ones(ROWS, WIDTH)

        def run() -> None:
            if clears == "before":
                adam.zero_grad()
            model(x).sum().backward()
            adam.step()
            if clears == "after":
                adam.zero_grad()

        return run

    return built, make_step


def test_gradients_that_stay_after_a_step_are_not_taken_for_inputs():
    before, after = estimated("plain", clears="before"), estimated("plain", clears="after")
    assert before.inputs == after.inputs
    assert before.rooms[0].activations == after.rooms[0].activations


class Constants(nn.Module):
    """Reads small tensors in its constructor, and keeps tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
        self.register_buffer("places", places.flatten(1))
        self.table = nn.Embedding(int(places.max()) + 1, WIDTH)
        self.scale = torch.tensor(torch.tensor(WIDTH).sqrt().tolist())
        self.waves = {"sine": [torch.arange(WIDTH).float()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.waves["sine"][0] + self.table(self.places[0]).mean(0)
        for drop in self.drops:
            x = drop(x)
        return x


def test_a_constructor_counts_once_on_the_cpu_and_beside_the_meta_device():
    with on_meta():
        here, beside = torch.zeros(2, device="cpu"), torch.zeros(2)
        for counts in (here, beside):
            counts.add_(1)
        assert (here.is_meta, beside.is_meta) == (False, True)
        assert here.tolist() == beside.tolist() == [1.0, 1.0]


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = {"batch_first": True, "bidirectional": True}
        self.layers = getattr(nn, kind)(WIDTH, WIDTH, 2, **layers)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        if lengths is None:
            return self.layers(x)[0]
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(x, lengths, batch_first=True, enforce_sorted=False)
        found, sizes = pad(self.layers(packed)[0], batch_first=True)
        assert sizes.shape == lengths.shape
        return found


class Experts(nn.Module):
    """Products of groups of rows, as transformers' experts compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        return nn.functional.grouped_mm(x, self.weight, offs=offsets)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, width = self.into(x).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, width.exp())
        torch.distributions.Categorical(logits=mean).sample()
        return self.out(drawn.rsample())


class Skipping(nn.Module):
    """Skips a layer at random, and makes a mask like its indices, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(torch.randint(0, 9, x.shape[:1]))
        mask[:1] = 0
        return self.layer(x)[mask > 0] if torch.rand([]) > 0.1 and mask.any() else x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "constants": Constants,
    "experts": Experts,
    "variational": Variational,
    "skipping": Skipping,
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "sparse": lambda: nn.Embedding(100, WIDTH, sparse=True),
}


def reads(loss: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Look at values as logs and metrics do, and check that they are finite."""
    if torch.isnan(loss) or not torch.isfinite(h).all():
        raise ArithmeticError
    print(f"loss {loss:.3f} {float(h.detach().cpu().numpy().mean()):.2f}")
    return loss + h[torch.isfinite(h)].sum() + torch.bincount(h.argmax(-1), minlength=9).sum()


def averages(model: nn.Module) -> Callable[[], None]:
    """A second model, a copy that is never trained."""
    average = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        average.load_state_dict(model.state_dict())

    return update


def step(model: str = "linear", how: str = "", rows: int = ROWS) -> Any:
    built = MODELS[model]()

    def make_step(model: nn.Module) -> Callable[[], None]:
        update = averages(model) if how == "averages" else lambda: None
        if how == "numbers":
            model.to(0)
        adam = torch.optim.AdamW(model.parameters(), capturable=how == "capturable")
        x = torch.ones(rows, WIDTH)
        if how == "numbers":
            x = x.pin_memory().to(0, non_blocking=True) + torch.ones(WIDTH, device=0)
        if isinstance(model, nn.Embedding):
            x = torch.ones(rows, dtype=torch.long)

        def run() -> None:
            h = model(x)
            loss = h.square().mean()
            (reads(loss, h) if how == "reads" else loss).backward()
            adam.step()
            adam.zero_grad()
            update()

        return run

    return built, make_step


@pytest.mark.filterwarnings("ignore:the step asked for values")
@pytest.mark.parametrize(
    ("model", "how"),
    [
        *((model, "") for model in ("constants", "variational", "experts", "skipping")),
        *(("linear", how) for how in ("reads", "averages", "numbers", "capturable")),
    ],
)
def test_what_users_write_is_estimated(model: str, how: str):
    found = estimated("step", model=model, how=how)
    more = estimated("step", model=model, how=how, rows=4 * ROWS)
    trained = sum(one.numel() for one in MODELS[model]().parameters())
    assert found.gradients == 4 * trained
    assert found.optimizer == pytest.approx(2 * 4 * trained, abs=100)
    assert found.masks == 0
    assert bool(found.unknown) == (how == "reads")
    assert more.rooms[0].peak_allocated >= found.rooms[0].peak_allocated
    if how == "averages":
        plain_step = estimated("step")
        assert found.inputs - plain_step.inputs == pytest.approx(4 * trained, abs=1024)


@pytest.mark.parametrize(
    ("model", "message"), [("lazy", "layer is lazy"), ("sparse", "makes sparse tensors")]
)
def test_what_has_no_size_without_values_is_refused_with_a_fix(model: str, message: str):
    refused = asked("step", model=model).refused
    assert refused is not None
    assert message in refused[0]


STEPS, LENGTH = 6, 48


def recurrent(kind: str = "LSTM", lengths: str = "") -> Any:
    def make_step(model: nn.Module) -> Callable[[], None]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        x = torch.ones(STEPS, LENGTH, WIDTH)
        sizes = {
            "": None,
            "short": torch.tensor([LENGTH] + [LENGTH // 4] * (STEPS - 1)),
            "full": torch.full((STEPS,), LENGTH),
            "unknown": torch.rand(STEPS).mul(LENGTH).long(),
        }[lengths]

        def run() -> None:
            model(x, sizes).square().mean().backward()
            sgd.step()
            sgd.zero_grad()

        return run

    return Recurrent(kind), make_step


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_take_what_their_lengths_say(kind: str):
    padded, full, short = (
        estimated("recurrent", kind=kind, lengths=lengths).rooms[0].activations
        for lengths in ("", "full", "short")
    )
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    output = 4 * STEPS * LENGTH * 2 * WIDTH  # of both directions, in fp32
    assert padded > 2 * (gates + 1) * output  # two layers keep their gates and results
    assert full == pytest.approx(padded, rel=0.3)
    assert short < 0.8 * full


@pytest.mark.soak
def test_lengths_that_are_not_known_are_taken_as_the_longest_and_counted():
    found = estimated("recurrent", lengths="unknown")
    full = estimated("recurrent", lengths="full")
    assert (found.masks > 0, full.masks) == (True, 0)
    assert found.rooms[0].peak_allocated == pytest.approx(full.rooms[0].peak_allocated, rel=0.01)


def ctc(rows: int = 4) -> Any:
    def make_step(model: nn.Module) -> Callable[[], None]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        x, targets = torch.ones(LENGTH, rows, WIDTH), torch.ones(rows, 10, dtype=torch.long)
        sizes = torch.full((rows,), LENGTH), torch.full((rows,), 10)

        def run() -> None:
            nn.functional.ctc_loss(model(x).log_softmax(-1), targets, *sizes).backward()
            sgd.step()
            sgd.zero_grad()

        return run

    return nn.Linear(WIDTH, WIDTH), make_step


def test_a_ctc_loss_is_estimated():
    assert estimated("ctc").masks == 0
