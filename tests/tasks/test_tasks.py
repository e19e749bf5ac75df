"""All tasks keep the same contract; their numbers are those of independent implementations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as oracle
from torch import Tensor, nn

from safari.config import parse
from safari.engine import assemble, load_data
from safari.errors import ConfigError
from safari.plugins import options_of
from safari.tasks import TASKS, Metric, Task, classification, multilabel, regression, tokens, with_metric
from safari.training import evaluate

N, CLASSES, LENGTH = 11, 7, 5


def sample(kind: str, n: int = N) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    outputs = torch.randn(n, CLASSES, generator=draw)
    if kind == "class":
        return outputs, torch.randint(CLASSES, (n,), generator=draw)
    if kind == "multi-hot":
        return outputs, (torch.rand(n, CLASSES, generator=draw) < 0.4).float()
    if kind == "numbers":
        return outputs, torch.randn(n, CLASSES, generator=draw)
    labels = torch.randint(CLASSES, (n, LENGTH), generator=draw)
    labels[0, 2:] = -100
    labels[1] = -100
    return torch.randn(n, LENGTH, CLASSES, generator=draw), labels


class Fixed(nn.Module):
    """The inputs are the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]()


def test_a_task_is_made_by_options_alone_and_says_what_it_is() -> None:
    for name, factory in TASKS.items():
        assert factory().name == name
        assert (factory.__doc__ or "").startswith(("One", "A", "Any"))
        assert all(option.default is not None for option in options_of(factory))


def test_the_loss_is_one_number_a_sample_and_its_mean_agrees(task: Task) -> None:
    outputs, labels = sample(task.labels)
    loss = task.loss(outputs, labels)
    assert loss.shape == (N,)
    # Each sample's loss is its own: alone it has the same.
    alone = torch.cat([task.loss(outputs[i : i + 1], labels[i : i + 1]) for i in range(N)])
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(task.mean_loss(outputs, labels), loss.mean())


def test_the_loss_runs_under_autograd_and_vmap(task: Task) -> None:
    outputs, labels = sample(task.labels, 12)
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.loss(leaf, labels).sum(), leaf)
    assert gradient.shape == outputs.shape
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().sum()) > 0
    stacked = torch.vmap(task.loss)(outputs.unflatten(0, (3, 4)), labels.unflatten(0, (3, 4)))
    torch.testing.assert_close(stacked.flatten(), task.loss(outputs, labels))

    def total(o: Tensor, y: Tensor) -> Tensor:
        return task.loss(o, y).sum()

    each = torch.vmap(torch.func.grad(total))(outputs.unflatten(0, (3, 4)), labels.unflatten(0, (3, 4)))
    torch.testing.assert_close(each.flatten(0, 1), gradient)


def test_measures_are_sums_so_that_batches_add_up(task: Task) -> None:
    outputs, labels = sample(task.labels)
    whole = task.measure(outputs, labels)
    parts = [task.measure(outputs[a:b], labels[a:b]) for a, b in ((0, 4), (4, N))]
    for name, value in whole.items():
        assert value.ndim == 0
        torch.testing.assert_close(value.double(), parts[0][name].double() + parts[1][name].double())


def test_a_test_finds_the_described_metrics(task: Task) -> None:
    outputs, labels = sample(task.labels)
    found = evaluate(Fixed(), outputs, labels, batch=4, task=task)
    assert set(found) == {metric.name for metric in task.metrics}
    assert task.score in found
    assert found == pytest.approx(evaluate(Fixed(), outputs, labels, batch=100, task=task))


def test_a_perfect_model_beats_a_random_one_in_every_metric(task: Task) -> None:
    outputs, labels = sample(task.labels)
    perfect = {
        "class": 9 * F.one_hot(labels.clamp(min=0).long(), CLASSES).float(),
        "tokens": 9 * F.one_hot(labels.clamp(min=0).long(), CLASSES).float(),
        "multi-hot": 18 * labels - 9,
        "numbers": labels,
    }[task.labels]
    best, found = (evaluate(Fixed(), o, labels, batch=4, task=task) for o in (perfect, outputs))
    for metric in task.metrics:
        better = best[metric.name] > found[metric.name]
        assert better == metric.higher, metric


def test_a_fitting_model_passes_the_check_and_others_hear_why(task: Task) -> None:
    outputs, labels = sample(task.labels)
    task.check(outputs, labels, CLASSES)
    with pytest.raises(ConfigError, match=rf"must return a tensor of shape \[11, .*, got shape \[11, {3}"):
        task.check(outputs[..., :3] if task.labels != "tokens" else outputs[:, :3], labels, CLASSES)
    with pytest.raises(ConfigError, match="got tuple"):
        task.check((outputs,), labels, CLASSES)  # type: ignore[arg-type]
    if task.labels in ("class", "tokens"):
        # More scores than classes are accepted, so the message must not ask for exactly as many.
        task.check(torch.cat([outputs, outputs], -1), labels, CLASSES)
        with pytest.raises(
            ConfigError, match=rf", at least {CLASSES}\] .*, got shape \[11, .*{CLASSES - 1}\]"
        ):
            task.check(outputs[..., :-1], labels, CLASSES)


def test_a_diverged_model_has_metrics_that_are_no_numbers_and_no_error(task: Task) -> None:
    outputs, labels = sample(task.labels)
    found = evaluate(Fixed(), torch.full_like(outputs, math.nan), labels, batch=4, task=task)
    assert math.isnan(found["loss"])


def test_tokens_by_hand_and_by_sklearn() -> None:
    outputs, labels = sample("tokens")
    found = evaluate(Fixed(), outputs, labels, batch=3, task=tokens())
    counted = (labels != -100).numpy()
    loss = oracle.log_loss(
        labels.numpy()[counted], outputs.double().softmax(2).numpy()[counted], labels=list(range(CLASSES))
    )
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    right = oracle.accuracy_score(labels.numpy()[counted], outputs.argmax(2).numpy()[counted])
    assert found["accuracy"] == pytest.approx(right)
    # A sample of padding alone has no loss, and gives no gradient.
    assert float(tokens().loss(outputs, labels)[1]) == 0


def test_another_label_can_be_ignored() -> None:
    outputs, labels = sample("tokens")
    zeros = torch.where(labels == -100, 0, labels)
    ours = tokens(ignore=0).loss(outputs, zeros)
    theirs = torch.stack([F.cross_entropy(o, y, ignore_index=0) for o, y in zip(outputs, zeros, strict=True)])
    torch.testing.assert_close(ours, theirs.nan_to_num(0.0))


def test_perplexity_beyond_all_numbers_is_infinite() -> None:
    outputs = torch.tensor([[[0.0, 1e6]]])
    assert evaluate(Fixed(), outputs, torch.tensor([[0]]), 1, task=tokens())["perplexity"] == math.inf


def test_several_labels_by_sklearn() -> None:
    outputs, labels = sample("multi-hot", 200)
    labels[0] = 0
    found = evaluate(Fixed(), outputs, labels, batch=64, task=multilabel())
    truth, guess = labels.numpy().astype(int), (outputs > 0).numpy().astype(int)
    assert found["f1"] == pytest.approx(oracle.f1_score(truth, guess, average="micro"))
    assert found["exact"] == pytest.approx(oracle.accuracy_score(truth, guess))
    ranking = oracle.label_ranking_average_precision_score(truth, outputs.numpy())
    assert found["ap"] == pytest.approx(ranking, rel=1e-6)
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(outputs, labels)))
    higher = evaluate(Fixed(), outputs, labels, batch=64, task=multilabel(threshold=0.8))
    guess = (outputs.sigmoid() > 0.8).numpy().astype(int)
    assert higher["f1"] == pytest.approx(oracle.f1_score(truth, guess, average="micro"))
    with pytest.raises(ConfigError, match=r"threshold must be above 0 and below 1, got 1\.0"):
        multilabel(threshold=1.0)


def test_numbers_by_sklearn() -> None:
    outputs, labels = sample("numbers")
    found = evaluate(Fixed(), outputs, labels, batch=4, task=regression())
    assert found["mae"] == pytest.approx(oracle.mean_absolute_error(labels, outputs), rel=1e-6)
    assert found["loss"] == pytest.approx(oracle.mean_squared_error(labels, outputs), rel=1e-6)
    assert found["rmse"] == pytest.approx(math.sqrt(found["loss"]))


@pytest.mark.parametrize("classes", [1, 2, 5, 6])
def test_top5_exists_where_there_are_more_than_five_classes(classes: int) -> None:
    found = evaluate(Fixed(), torch.eye(classes), torch.arange(classes), batch=2)
    assert found["top1"] == 1.0
    assert ("top5" in found) == (classes > 5)


def test_a_metric_of_your_own() -> None:
    def margin(outputs: Tensor, labels: Tensor) -> Tensor:
        best = outputs.topk(2, dim=1).values
        return best[:, 0] - best[:, 1]

    for base in (classification(), multilabel()):
        task = with_metric(base, "margin", margin, score=True)
        outputs, labels = sample(base.labels)
        found = evaluate(Fixed(), outputs, labels, batch=4, task=task)
        assert found.pop("margin") == pytest.approx(float(margin(outputs, labels).mean()))
        column = with_metric(base, "margin", lambda o, y: margin(o, y)[:, None])
        assert evaluate(Fixed(), outputs, labels, batch=4, task=column) == evaluate(
            Fixed(), outputs, labels, batch=4, task=task
        )
        assert found == evaluate(Fixed(), outputs, labels, batch=4, task=base)
        assert (task.score, task.metric("margin").label) == ("margin", "margin")


def test_a_task_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"score must be one of its metrics \(top1, top5, loss\), got 'f1'"):
        replace(classification(), score="f1")
    with pytest.raises(ConfigError, match="metrics must have different names, got top1, top5, loss, loss"):
        with_metric(classification(), "loss", lambda o, y: o.sum())
    with pytest.raises(ConfigError, match="a metric's name must be an identifier, got 'top 1'"):
        Metric("top 1", "top 1")
    assert Metric("mae", "error", higher=False).to_dict() == {
        "name": "mae", "label": "error", "percent": False, "higher": False, "short": ""
    }  # fmt: skip


def test_a_config_names_the_task() -> None:
    config = parse({"rounds": 1, "arms": ["drop"]})
    world = assemble(config, 0, load_data(config))
    assert world.task.name == "classification"
    found = world.scores(world.start, 0)
    assert found is not None
    assert list(found) == ["loss", "top1", "top5"]
    with pytest.raises(
        ConfigError, match=r"task\.name must be one of .*; got 'clasification' \(did you mean"
    ):
        assemble(parse({"task": {"name": "clasification"}}), 0, load_data(config))
    with pytest.raises(ConfigError, match=r"task\.ignore is not an option \(allowed: none\)"):
        assemble(parse({"task": {"name": "classification", "ignore": 3}}), 0, load_data(config))


def test_the_score_of_the_default_task_is_that_of_before() -> None:
    """The numbers of the loop that stood here before tasks did."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((37, 10)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, 37))
    totals = torch.zeros(3, dtype=torch.float64)
    for start in range(0, 37, 8):
        o, y = logits[start : start + 8], labels[start : start + 8]
        best = o.topk(5, dim=1).indices == y[:, None]
        loss = F.cross_entropy(o, y, reduction="sum")
        totals += torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
    found = evaluate(Fixed(), logits, labels, batch=8)
    assert [found["loss"], found["top1"], found["top5"]] == [value / 37 for value in totals.tolist()]
