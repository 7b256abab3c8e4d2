"""Operators of PyTorch in the glue of a step, on tensors that live on another partition; runs on every rank."""

import warnings
from typing import Any

import torch
from small_net import job
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

import smp

SAMPLES = 4

# Results that depend on random numbers, on addresses or on uninitialised memory, so that two runs differ.
NOT_REPEATABLE = {
    "bernoulli", "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "multinomial", "normal",
    "chalf", "rand_like", "randint_like", "randint", "randn", "randn_like", "uniform", "cauchy", "exponential", "geometric", "log_normal", "random",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu", "pca_lowrank", "svd_lowrank", "nn.functional.multi_head_attention_forward", "resize_", "resize_as_",
}  # fmt: skip

# LAPACK sums in an order that depends on where in memory a matrix begins: two runs of plain PyTorch differ as well.
ALIGNMENT_MATTERS = {"linalg.lstsq"}


class There(nn.Module):
    """Gives back what it gets, from another partition."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(1, 1), There()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(x)


def operators() -> list[OpInfo]:
    """Those that can be compared, in a fixed order."""
    repeatable = [op for op in op_db if op.name not in NOT_REPEATABLE and torch.float32 in op.dtypes]
    repeatable = [op for op in repeatable if not op.name.startswith("sparse.")]  # only dense tensors travel
    return sorted(repeatable, key=lambda op: op.formatted_name)


def samples_of(op: OpInfo) -> list[Any]:
    torch.manual_seed(0)
    grad = torch.float32 in op.backward_dtypes and op.supports_autograd
    samples = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=grad):
        if sample.kwargs.get("dropout_p", 0) == 0:
            samples.append(sample)
        if len(samples) == SAMPLES:
            break
    return samples


def _fresh(tree: Any) -> Any:
    """The same tensors, as leaves of their own."""
    return tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x, tree
    )


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def _run(op: OpInfo, tree: Any, move: Any) -> list[torch.Tensor]:
    first, args, kwargs = tree_map(lambda x: move(x) if isinstance(x, torch.Tensor) else x, tree)
    return _tensors(op.op(first, *args, **kwargs))


def _differentiable(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in outputs if x.requires_grad and x.dtype.is_floating_point]


def _equal(name: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    rounding = 1e-5 if name in ALIGNMENT_MATTERS else 0.0
    try:
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, equal_nan=True)
    except AssertionError:
        return False
    return True


def sweep(begin: int, end: int) -> dict[str, Any]:
    """Runs operators `begin` to `end` of the list with their sample inputs on the other partition: those that raise or that give other
    outputs or gradients than here, with the reason."""
    warnings.simplefilter("ignore")
    problems: dict[str, str] = {}
    counts = {"operators": 0, "samples": 0, "gradients": 0, "remote": 0}
    chosen = operators()[begin:end]

    @smp.step
    def one(model: smp.DistributedModel, op: OpInfo, tree: Any) -> list[torch.Tensor]:
        move = model.module.there
        outputs = _run(op, tree, lambda x: move(x))
        counts["remote"] += any(smp._C.is_remote(x) for x in outputs)
        roots = _differentiable(outputs)
        if roots:
            model.backward(roots, [torch.ones_like(x) for x in roots])
        return outputs

    with job(2, 1):
        net = Pair()
        smp.set_partition(net.there, 1)
        model = smp.DistributedModel(net)
        for op in chosen:
            counts["operators"] += 1
            for sample in samples_of(op):
                inputs = (sample.input, sample.args, sample.kwargs)
                theirs_in, ours_in = _fresh(inputs), _fresh(inputs)
                error = None
                try:
                    theirs = _run(op, theirs_in, lambda x: x.clone())
                    roots = _differentiable(theirs)
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
                except Exception as e:
                    error = e
                try:
                    ours = one(model, op, ours_in) if error is None else None
                except Exception as e:
                    if smp.rank() == 0:
                        problems.setdefault(op.formatted_name, f"{type(e).__name__}: {str(e)[:300]}")
                    continue
                if error is not None or smp.rank() != 0:
                    continue
                counts["samples"] += 1
                assert ours is not None
                pairs = [(a.outputs[0], b.detach()) for a, b in zip(ours, theirs, strict=True)]
                leaves = [
                    (a, b) for a, b in zip(_tensors(ours_in), _tensors(theirs_in), strict=True) if b.requires_grad
                ]
                for kind, found in (("output", pairs), ("gradient", [(a.grad, b.grad) for a, b in leaves])):
                    for a, b in found:
                        if (a is None) != (b is None):
                            problems.setdefault(op.formatted_name, f"{kind}: one has none")
                        elif a is not None and not _equal(op.name, a, b):
                            problems.setdefault(
                                op.formatted_name, f"{kind}: {a.flatten()[:4]} instead of {b.flatten()[:4]}"
                            )
                        counts["gradients"] += kind == "gradient" and a is not None
    return {"problems": problems, **counts}
