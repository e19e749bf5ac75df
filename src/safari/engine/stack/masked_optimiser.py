"""Steps of the optimiser over the kept weights alone, for the CPU.

Of a model cut to a fifth, four fifths of the gradient are not wanted: it is cheaper to pick the wanted ones
than to fill the others with 0, and a gradient that is not read cannot change a weight that is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam

# torch.optim.Adam's own constants, which the reference uses.
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class MaskedStep:
    """A step in place, a call: `parameters` at their `places` go against their gradient.

    >>> parameters = torch.tensor([1.0, 0.0, 3.0])
    >>> step = MaskedStep(parameters, torch.tensor([0, 2]), optimiser="sgd", lr=1.0, steps=2)
    >>> step(torch.tensor([2.0, torch.nan, 4.0]))
    >>> parameters
    tensor([0., 0., 1.])
    """

    def __init__(self, parameters: Tensor, places: Tensor, *, optimiser: str, lr: float, steps: int):
        self._parameters, self._adam, self._lr, self._steps = parameters, optimiser == "adam", lr, steps
        self._places = places if len(places) < len(parameters) else None
        self._values = parameters if self._places is None else parameters[places]
        self._moments = (torch.zeros_like(self._values), torch.zeros_like(self._values))
        self._count = torch.zeros(())

    def __call__(self, gradient: Tensor) -> None:
        """The next step, with the gradient of all parameters."""
        wanted = gradient if self._places is None else gradient.index_select(0, self._places)
        if self._adam:
            self._adam_step(wanted)
        else:
            self._values.add_(wanted, alpha=-self._lr / self._steps)
        if self._places is not None:
            self._parameters.scatter_(0, self._places, self._values)

    def _adam_step(self, gradient: Tensor) -> None:
        first, second = self._moments
        adam(
            [self._values],
            [gradient],
            [first],
            [second],
            [],
            [self._count],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=self._lr,
            weight_decay=0.0,
            eps=EPS,
            maximize=False,
        )
