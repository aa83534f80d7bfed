from __future__ import annotations

import pytest
import torch
from torch import nn

from crossward.federation.errors import BadInput
from crossward.federation.scopes import layout_of
from crossward.methods import Method, Task, create
from crossward.methods.base import Batch, Context, Model
from crossward.methods.fedavg import FedAvg
from crossward.methods.fedprox import FedProx

TASK = Task(classes=("a", "b"), channels=1, size=8, rounds=2, width=0.0625)


class Two(nn.Module):
    """Two parameters, of which the server knows one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.head = nn.Parameter(torch.tensor([[5.0]]))
        self.own = nn.Parameter(torch.tensor([100.0]))
        self.register_buffer("mean", torch.tensor([7.0]))


def test_the_penalty_and_its_gradient_by_hand() -> None:
    model = Two()
    tensors = {"shared": torch.tensor([0.0, 2.0, 5.0]), "head": torch.tensor([[2.0]]), "mean": torch.tensor([-9.0])}
    context = Context("a", 1, 2, tensors, torch.Generator())
    (penalty,) = FedProx(mu=0.5).penalty(model, context).values()  # type: ignore[arg-type]
    # 0.5 / 2 * (1 + 0 + 4 + 9); the buffer and the parameter that was not received do not count.
    assert penalty.item() == pytest.approx(3.5)
    penalty.backward()
    assert model.shared.grad is not None
    assert model.head.grad is not None
    assert model.shared.grad.tolist() == [0.5, 0.0, -1.0]
    assert model.head.grad.tolist() == [[1.5]]
    assert model.own.grad is None


def test_at_the_received_model_the_penalty_is_zero_and_pulls_nowhere() -> None:
    method = FedProx(mu=3.0)
    model = method.build(TASK)
    context = Context("a", 1, 2, method.start(TASK, model).tensors, torch.Generator())
    (penalty,) = method.penalty(model, context).values()
    assert penalty.item() == 0.0
    penalty.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def after_steps(method: Method) -> dict[str, torch.Tensor]:
    """Three plain steps of the trainer's objective."""
    model: Model = method.build(TASK).train()
    received = {name: tensor.clone() for name, tensor in method.start(TASK, model).tensors.items()}
    context = Context("a", 1, 2, received, torch.Generator())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = Batch(torch.randn(4, 1, 8, 8, generator=generator), torch.tensor([0, 1, 0, 1]))
        optimiser.zero_grad()
        terms = method.terms(model, model(batch.images), batch, context)
        loss = torch.stack([term.mean() for term in terms.values()]).sum()
        (loss + sum(method.penalty(model, context).values())).backward()
        optimiser.step()
    return model.state_dict()


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    keys = [key for key in one if key.endswith("weight")]
    return float(sum((one[key] - other[key]).double().square().sum() for key in keys))


def test_mu_zero_is_fedavg_bit_for_bit_and_mu_holds_back() -> None:
    plain, without = after_steps(FedAvg()), after_steps(FedProx(mu=0.0))
    assert all(torch.equal(plain[key], without[key]) for key in plain)
    start = FedAvg().build(TASK).state_dict()
    held, tight = after_steps(FedProx(mu=1.0)), after_steps(FedProx(mu=5.0))
    assert distance(tight, start) < distance(held, start) < distance(plain, start)


def test_it_shares_what_fedavg_shares() -> None:
    assert layout_of(FedProx().build(TASK)) == layout_of(FedAvg().build(TASK))
    model = FedAvg().build(TASK)
    assert FedProx().rules(TASK, model).keys() == FedAvg().rules(TASK, model).keys()


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_strength_that_makes_no_sense_is_refused(mu: float) -> None:
    with pytest.raises(BadInput, match="mu"):
        create("fedprox", mu=mu)


def test_the_default_is_the_papers() -> None:
    assert FedProx().mu == 0.01
    assert create("fedprox", mu=1) == FedProx(mu=1.0)
