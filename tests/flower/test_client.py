"""The client's end: the decorator, the mod, the masked optimiser."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from flower.kit import Loopback, Net, net, train_a_bit
from safari import prune
from safari.errors import SafariError
from safari.flower import SafariStrategy, masked, masks_of, sparse, sparse_mod
from safari.runs import RunFolder

PRUNERS = ["mag", "rand", "snip", "grasp", "synflow"]


def batch(message, context):
    g = torch.Generator().manual_seed(3)
    return torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)


def decorated(**options) -> ClientApp:
    app = ClientApp()
    app.train()(sparse(Net, batch=batch, **options)(train_a_bit))
    return app


def with_mod(wrap: bool = True, **options) -> ClientApp:
    """Flower's own template, with two lines of ours: the mod and the wrapped optimiser."""
    app = ClientApp(mods=[sparse_mod(Net, batch=batch, **options)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
        if wrap:
            optimizer = masked(optimizer, model, masks_of(message))
        client = context.node_config["partition-id"]
        g = torch.Generator().manual_seed(1000 * message.content["config"]["server-round"] + client)
        x, y = torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 16 + client, "train_loss": float(loss.detach())})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def play(app: ClientApp, tmp_path, pruner="mag") -> tuple[SafariStrategy, list[dict]]:
    config = {"pruning": {"pruner": pruner, "sparsity": 0.7}}
    strategy = SafariStrategy(net(), 2, config=config, run=tmp_path, give_up=None)
    strategy.start(Loopback({4: app, 9: app}), num_rounds=3, timeout=0.1)
    return strategy, RunFolder.open(tmp_path).trials()[0].records()


@pytest.mark.parametrize("pruner", PRUNERS)
def test_decorator_and_mod_come_to_the_same_bits(pruner, tmp_path):
    one, lines = play(decorated(), tmp_path / "one", pruner)
    two, same = play(with_mod(), tmp_path / "two", pruner)
    assert torch.equal(one.server.model, two.server.model)
    assert lines == same
    assert all(line["arrived"] == [0, 1] for line in lines)
    kept = round(0.3 * one.layout.prunable_count)
    assert lines[0]["density"] == kept / one.layout.prunable_count


def assigned(model, loss, optimizer):
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def differentiable(model, loss, optimizer):
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def by_hand(model, loss, optimizer):
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.01 * gradient


@pytest.mark.parametrize("move", [assigned, differentiable, by_hand])
def test_any_loop_stays_in_the_mask(move, tmp_path):
    momenta = []

    def train(model, message, context):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cut = (model.one.weight == 0).clone()
        x, y = batch(message, context)
        for _ in range(3):
            move(model, torch.nn.functional.cross_entropy(model(x), y), optimizer)
        if optimizer.state:
            momenta.append(optimizer.state[model.one.weight]["momentum_buffer"][cut])
            assert bool((model.one.weight[cut] == 0).all())
        return {"num-examples": 8}

    app = ClientApp()
    app.train()(sparse(Net, batch=batch)(train))
    _, lines = play(app, tmp_path)
    assert [line["arrived"] for line in lines] == [[0, 1]] * 3
    # A pruned weight has no momentum either.
    assert all(not rest.any() for rest in momenta)
    assert len(momenta) == (0 if move is by_hand else 6)
    # Nothing is left of it for optimisers that come later.
    layer = torch.nn.Linear(2, 2)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def test_a_loop_that_leaves_the_mask_is_refused(tmp_path):
    _, lines = play(with_mod(wrap=False), tmp_path)
    assert (
        "weights that the mask cuts are not 0 after training: wrap the optimiser" in lines[0]["reasons"]["0"]
    )


def test_a_pruner_of_ones_own_is_given_to_the_client(tmp_path):
    def last(module, batch, generator):
        """Keeps the weights of the last layer."""
        return {
            n: torch.full(p.shape, float(n.startswith("two")))
            for n, p in module.named_parameters()
            if p.ndim > 1
        }

    strategy, lines = play(decorated(pruner=last), tmp_path)
    assert bool((strategy.layout.split(strategy.server.model)["one.weight"] == 0).all())
    # 22 of 72 weights stay, and the last layer has 24.
    assert lines[0]["layers"] == {"one.weight": 0.0, "two.weight": round(22 / 24, 6)}


@pytest.mark.parametrize("wrap", [sparse, sparse_mod])
def test_an_impossible_pruner_is_reported_where_it_is_named(wrap):
    with pytest.raises(SafariError, match=r"^pruner must be one of grasp, mag, .*; got 'nix'$"):
        wrap(Net, pruner="nix")
    with pytest.raises(SafariError, match=r"^pruner must be a name, a Pruner or a score function, got 3$"):
        wrap(Net, pruner=3)


def test_batches_are_asked_for_where_a_pruner_needs_them(tmp_path):
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    _, lines = play(app, tmp_path, "snip")
    assert lines[0]["reasons"]["0"] == "error 2: PruneError: snip needs batch=(inputs, labels), got None"


def test_a_function_that_returns_no_model_is_refused(tmp_path):
    app = ClientApp(mods=[sparse_mod(Net)])
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    _, lines = play(app, tmp_path)
    assert "the training function's reply holds no record 'arrays'" in lines[0]["reasons"]["0"]


def test_messages_without_a_model_pass_the_mod_untouched():
    Loopback({})
    app = ClientApp(mods=[sparse_mod(Net)])
    app.query()(lambda message, context: Message(message.content, reply_to=message))
    asked = Message(RecordDict({"q": MetricRecord({"a": 1})}), 1, "query")
    answer = app(asked, Context(1, 1, {}, RecordDict(), {}))
    assert answer.content["q"]["a"] == 1


def test_masks_of_a_message_without_any():
    with pytest.raises(SafariError, match="put sparse_mod into the ClientApp's mods"):
        masks_of(Message(RecordDict(), 1, "train"))


def test_evaluation_gets_the_whole_model_by_either_way(tmp_path):
    seen = []

    def look(model, message, context):
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        return {"num-examples": 1, "accuracy": 1.0}

    one = decorated()
    one.evaluate()(sparse(Net)(look))
    two = with_mod()

    @two.evaluate()
    def test(message, context):
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord(look(model, message, context))
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = SafariStrategy(net(), 2, evaluate=True)
    result = strategy.start(Loopback({4: one, 9: two}), num_rounds=1, timeout=0.1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 1.0
    assert len(seen) == 2
    assert all(torch.equal(vector, strategy.server.model[: strategy.layout.parameters]) for vector in seen)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@settings(max_examples=15)
@given(st.sampled_from(sorted(OPTIMISERS)), st.floats(0.1, 0.9), st.integers(0, 99))
def test_a_masked_optimiser_never_leaves_its_mask(name, sparsity, seed):
    model = net(seed)
    masks = prune(model, sparsity=sparsity)
    optimizer = masked(OPTIMISERS[name](model.parameters()), model, masks)
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    before = model.two.bias.detach().clone()
    for _ in range(3):
        optimizer.step(closure)
    for mask_name, mask in masks.items():
        assert bool((model.get_parameter(mask_name)[~mask] == 0).all())
    assert not torch.equal(model.two.bias, before)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"three": torch.ones(2, dtype=torch.bool)}, "the module has no parameter 'three'"),
        (
            {"two.bias": torch.ones(2, dtype=torch.bool)},
            r"two.bias must be bool of shape \(3,\), got torch.bool",
        ),
        ({"two.bias": torch.ones(3)}, r"two.bias must be bool of shape \(3,\), got torch.float32"),
    ],
)
def test_masks_that_do_not_fit_are_named(masks, message):
    model = net()
    with pytest.raises(SafariError, match=message):
        masked(torch.optim.SGD(model.parameters(), lr=1.0), model, masks)
