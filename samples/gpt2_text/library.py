"""The training over several ranks. All that differs from plain PyTorch is in this file."""

import torch
from model import forward, make_optimizer

import smp


@smp.step
def train_step(model, ids):
    loss = forward(model, ids)
    model.backward(loss)
    return loss


@smp.step
def evaluation_step(model, ids):
    return forward(model, ids)


def start(options):
    """Joins the other ranks; collective over all of them."""
    smp.init({"partitions": options.partitions, "microbatches": options.microbatches})


class LibraryRun:
    """Model and optimizer with the three calls that the training loop needs; each is collective over all ranks."""

    def __init__(self, options, model):
        self.rank = smp.rank()
        self.model = smp.DistributedModel(model)
        self.optimizer = smp.DistributedOptimizer(make_optimizer(self.model.parameters(), options))

    def train(self, ids):
        """Forward and backward over the microbatches; returns the loss of each. The caller steps."""
        return train_step(self.model, ids).outputs

    def evaluate(self, ids):
        """Mean loss of one batch."""
        with torch.no_grad():
            return evaluation_step(self.model, ids).reduce_mean().item()

    def state_dict(self):
        return self.model.state_dict()
