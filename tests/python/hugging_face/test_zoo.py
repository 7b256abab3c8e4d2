"""Hugging Face's models as they are, of two versions of transformers: losses and gradients equal those of plain PyTorch bit for bit."""

import itertools
import sys
from pathlib import Path

import pytest
import zoo
import zoo_cases
from torch import nn

VERSIONS = {"4.57.6": (), "5.17.0": (str(Path(sys.prefix) / "transformers5"),)}
ROUNDING = 1e-6
TEXT = [name for name, member in zoo.MEMBERS.items() if member.kind != "images"]


def check(outcomes, name, version, exact=True):
    for rank, outcome in enumerate(outcomes):
        assert outcome["version"] == version
        if exact and name not in zoo.MANY_TIES:
            assert outcome["differences"] == [], rank
        # Losses are exact always.
        assert all(isinstance(d[2], float) and d[2] < ROUNDING for d in outcome["differences"]), (rank, outcome)
        assert not any(d[1].startswith("loss") for d in outcome["differences"]), (rank, outcome)
        assert all(value == 0 for value in outcome["state"].values()), (rank, outcome["state"])
        assert outcome["compared"], rank
    assert sorted(key for outcome in outcomes for key in outcome["compared"]) == outcomes[0]["expected"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_training_with_default_arguments_equals_plain_pytorch(clusters, name, version):
    check(clusters(2, *VERSIONS[version]).run(zoo_cases.compare, name, 2), name, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TEXT)
def test_training_with_a_padding_mask_equals_plain_pytorch(clusters, name, version):
    check(clusters(2, *VERSIONS[version]).run(zoo_cases.compare, name, 2, masked=True), name, version)


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_four_partitions_equal_plain_pytorch(clusters, name):
    check(clusters(4).run(zoo_cases.compare, name, 4), name, "4.57.6")


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_that_hooks_capture_inside_layers_are_right(clusters, version):
    outcomes = clusters(2, *VERSIONS[version]).run(zoo_cases.compare, "mixtral", 2, output_router_logits=True)
    check(outcomes, "mixtral", version, exact=False)  # three gradients meet in a layer, which now runs in pieces


# ---- activation checkpointing


def check_recomputes(outcomes, name):
    """Layers ran again, once for each backward."""
    once = zoo_cases.STEPS * zoo_cases.MICROBATCHES
    for rank, outcome in enumerate(outcomes):
        assert set(outcome["recomputes"]) <= {once}, (rank, outcome["recomputes"])
    # In a part of the model that lies on one partition PyTorch's own checkpoint runs, which is not counted here.
    assert name == "t5" or all(outcome["recomputes"] for outcome in outcomes)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_layer_stacks_that_are_checkpointed_equal_plain_pytorch(clusters, name, version):
    outcomes = clusters(2, *VERSIONS[version]).run(zoo_cases.compare, name, 2, checkpointing="set")
    check(outcomes, name, version)
    check_recomputes(outcomes, name)


@pytest.mark.parametrize("how", ["native", "reentrant"])
@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_gradient_checkpointing_of_the_model_runs_on_the_owners(clusters, name, how):
    outcomes = clusters(2).run(zoo_cases.compare, name, 2, checkpointing=how)
    check(outcomes, name, "4.57.6")
    check_recomputes(outcomes, name)


# ---- balance


def stack_units(model: nn.Module) -> list[int]:
    """Sizes, in the order of registration, of what a cut of the layer stack can be made between: each layer of a ModuleList, and each
    largest module without one. A shared parameter counts where it comes first."""
    seen: set[int] = set()
    sizes: list[int] = []

    def own(parameters) -> int:
        total = 0
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.numel()
        return total

    def descend(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                sizes.extend(own(layer.parameters()) for layer in child)
            elif any(isinstance(m, nn.ModuleList) and len(m) == zoo.LAYERS for m in child.modules()):
                sizes.append(own(child.parameters(recurse=False)))
                descend(child)
            else:
                sizes.append(own(child.parameters()))

    descend(model)
    return [size for size in sizes if size]


def best_bottleneck(sizes: list[int], partitions: int) -> int:
    """Size of the largest part in the best cut into contiguous parts; every cut is tried."""
    cuts = itertools.combinations(range(1, len(sizes)), partitions - 1)
    return min(max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cut, len(sizes)])) for cut in cuts)


@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_the_largest_partition_is_near_that_of_the_best_cut(clusters, name, partitions):
    outcomes = clusters(partitions).run(zoo_cases.compare, name, partitions)
    best = best_bottleneck(stack_units(zoo.build(name)), partitions)
    assert max(outcome["parameters"] for outcome in outcomes) <= 1.2 * best
