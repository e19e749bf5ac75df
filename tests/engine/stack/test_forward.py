"""Every sort of module: how it is stacked, and that clients learn what each would learn alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.stack.cases import CASES, CLASSES
from safari.engine.stack import trial
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import by_loop, by_vmap, stack
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.train import gradients, train_stacked
from safari.models import Layout
from safari.training import train_local

CLIENTS, BATCH, STEPS = 3, 5, 3
SEEDS = [11, 12, 13]


class Setting:
    """A case's module, its stack, and what three clients begin with."""

    def __init__(self, name: str):
        self.case = CASES[name]
        with torch.random.fork_rng([]):
            torch.manual_seed(5)
            self.module = self.case.make()
        self.layout = Layout.of(self.module)
        self.flat = Flat(self.layout, CLIENTS)
        self.counters = self.layout.counters(self.module)
        self.draw = torch.Generator().manual_seed(6)
        self.start = self.layout.read(self.module)
        self.stack = stack(self.module, self.layout, self.case.inputs(8, self.draw))
        x = [self.case.inputs(CLIENTS * BATCH, self.draw) for _ in range(STEPS)]
        y = [torch.randint(0, CLASSES, (CLIENTS * BATCH,), generator=self.draw) for _ in range(STEPS)]
        self.batches = list(zip(x, y, strict=True))
        kept = torch.rand((CLIENTS, self.layout.size), generator=self.draw) < 0.7
        self.masks = kept | ~self.layout.prunable
        self.frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}

    def random_state(self) -> RandomState:
        return RandomState(SEEDS, torch.device("cpu"), self.counters)

    def own(self, client: int) -> list[tuple[Tensor, Tensor]]:
        part = slice(client * BATCH, (client + 1) * BATCH)
        return [(x[part].clone(), y[part]) for x, y in self.batches]

    def fresh(self) -> nn.Module:
        module = copy.deepcopy(self.module)
        self.layout.put_back(module, self.counters)
        return module


@pytest.mark.parametrize("float32_decides", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_way_and_its_reason(name, float32_decides, monkeypatch):
    """The same if all gradients jumped that are rounded, as some do where the input of a ReLU is nearly 0."""
    if not float32_decides:
        monkeypatch.setattr(trial, "_GRADIENT_TOLERANCE", 1e-10)
    case, found = CASES[name], Setting(name).stack
    assert found.way == case.way, found.why
    assert found.why.startswith(case.why) if case.why else found.why == ""


@pytest.mark.parametrize("name", CASES)
def test_trained_together_as_alone(name):
    s = Setting(name)
    together, losses, *_ = train_stacked(
        s.stack.train,
        s.flat,
        s.start,
        s.masks,
        [(x.clone(), y) for x, y in s.batches],
        STEPS,
        optimiser="sgd",
        lr=0.3,
        random_state=s.random_state(),
        frozen=s.frozen,
    )
    rows = s.flat.to_rows(together)
    for client in range(CLIENTS):
        alone, loss, *_ = train_local(
            s.fresh(),
            s.layout,
            s.start,
            s.masks[client],
            s.own(client),
            optimiser="sgd",
            lr=0.3,
            seed=SEEDS[client],
        )
        # Three steps in float32: sums in another order, and no more.
        torch.testing.assert_close(rows[client], alone, rtol=1e-4, atol=2e-6)
        assert torch.equal(rows[client] == 0, alone == 0), "another support"
        assert float(losses[client]) == pytest.approx(loss, rel=1e-5)
    assert not torch.equal(rows[0], s.start), "nothing was learned"


@pytest.mark.parametrize("name", CASES)
def test_gradients_together_as_alone(name):
    s = Setting(name)
    buffer = s.flat.from_rows(s.start.expand(CLIENTS, -1))
    x, y = s.batches[0]
    split = s.flat.parameters
    found, _ = gradients(
        s.stack.train, s.flat, buffer[:split], buffer[split:], x.clone(), y, s.random_state(), s.frozen
    )
    rows = s.flat.to_rows(torch.cat([found, torch.zeros(len(buffer) - split)]))
    for client in range(CLIENTS):
        module = s.fresh().train()
        own, labels = s.own(client)[0]
        with torch.random.fork_rng([]):
            torch.manual_seed(SEEDS[client])
            F.cross_entropy(module(own), labels).backward()
        for entry in (e for e in s.layout.entries if e.kind != "buffer"):
            p = module.get_parameter(entry.name)
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(
                rows[client, entry.offset : entry.end].view(p.shape),
                expected,
                rtol=1e-4,
                atol=1e-6,
                msg=entry.name,
            )


@pytest.mark.parametrize("name", [name for name in CASES if "ropout" in name])
def test_dropout_draws_the_same_numbers_as_alone(name):
    s = Setting(name)
    x = s.batches[0][0]
    spread = s.flat.from_rows(s.start.expand(CLIENTS, -1))
    views = s.flat.views(spread[: s.flat.parameters], spread[s.flat.parameters :])
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(SEEDS[0])
        alone = s.fresh().train()(x[:BATCH].clone())
    # Whoever else is there, and when nobody is: a group of one has its activations in another order.
    for clients in (1, 2, 3):
        few = {key: value[:clients] for key, value in views.items()}
        random_state = RandomState([SEEDS[0], 99, 98][:clients], torch.device("cpu"))
        with torch.no_grad():
            found = s.stack.train(few, x[: clients * BATCH].clone(), random_state)
        torch.testing.assert_close(found[:BATCH], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["nn.Dropout", "F.dropout", "noise", "recurrent", "counts beside its state"])
def test_neither_trial_nor_training_moves_the_global_generator_or_the_module(name):
    before = torch.get_rng_state()
    s = Setting(name)
    train_stacked(
        s.stack.train,
        s.flat,
        s.start,
        s.masks,
        s.batches,
        STEPS,
        optimiser="adam",
        lr=0.1,
        random_state=s.random_state(),
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(s.layout.read(s.module), s.start)
    assert all(torch.equal(s.counters[k], v) for k, v in s.layout.counters(s.module).items())


def test_a_module_that_fails_on_the_trial_trains_one_by_one():
    class Eight(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x.view(5, 5) if self.training else x)

    module = Eight()
    found = stack(module, Layout.of(module), torch.randn(8, 5))
    assert found.way == "loop"
    assert found.why == "RuntimeError: shape '[5, 5]' is invalid for input of size 40"


def test_a_module_in_half_precision_trains_one_by_one():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3, dtype=torch.bfloat16)

        def forward(self, x):
            return self.head(x.bfloat16()).float()

    module = Half()
    found = stack(module, Layout.of(module), torch.randn(8, 5))
    assert (found.way, found.why) == ("loop", "head.weight is torch.bfloat16")


def test_a_way_that_cannot_do_bfloat16_is_passed_over(monkeypatch):
    def in_float32(module, training):
        forward = by_vmap(module, training)

        def checked(tensors, x, random_state):
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("not in bfloat16")
            return forward(tensors, x, random_state)

        return checked

    def cannot(module, training, fuse=False):
        raise trial.CannotStack("no")

    monkeypatch.setattr("safari.engine.stack.forward.by_layers", cannot)
    monkeypatch.setattr("safari.engine.stack.forward.by_vmap", in_float32)
    module = nn.Linear(5, 3)
    layout, example = Layout.of(module), torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    assert stack(module, layout, example).way == "vmap"
    found = stack(module, layout, example, bfloat16=True)
    assert (found.way, found.why) == ("loop", "layers: no; vmap: RuntimeError: not in bfloat16")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda out: out * torch.nan if out.dtype == torch.float32 else out, "its output"),
        (lambda out: out * 1.01, "its output"),
        (lambda out: _Gradient.apply(out, 1.02), "the gradient of weight"),
        (
            lambda out: _Gradient.apply(out, 1.6 if out.dtype == torch.float32 else 1.0),
            "the gradient of weight",
        ),
    ],
    ids=["NaN in float32", "another output", "another gradient", "a gradient far off in float32"],
)
def test_what_float64_does_not_excuse(wrong, why):
    module = nn.Linear(5, 3)
    layout, example = Layout.of(module), torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    alone = by_loop(module, True)

    def stacked(tensors, x, random_state):
        return wrong(alone(tensors, x, random_state))

    with pytest.raises(trial.CannotStack, match=f"^{why} differs from the module's own$"):
        trial.compare(stacked, alone, module, layout, example)


def test_what_float64_excuses():
    module = nn.Linear(5, 3)
    layout, example = Layout.of(module), torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    alone = by_loop(module, True)

    def stacked(tensors, x, random_state):
        out = alone(tensors, x, random_state)
        return _Gradient.apply(out, 1.2 if out.dtype == torch.float32 else 1.0)

    trial.compare(stacked, alone, module, layout, example)


class _Gradient(torch.autograd.Function):
    """The same value with another gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None
