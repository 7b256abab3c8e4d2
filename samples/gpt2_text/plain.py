"""The same training in one process, without the library: what the library's results and speed are compared with."""

import torch
from model import forward, make_optimizer


class PlainRun:
    """Model and optimizer with the three calls that the training loop needs; `library.LibraryRun` has the same ones."""

    rank = 0

    def __init__(self, options, model):
        self.model = model
        self.microbatches = options.microbatches
        self.optimizer = make_optimizer(self.model.parameters(), options)

    def train(self, ids):
        """Forward and backward over the microbatches in order; returns the loss of each. The caller steps."""
        losses = []
        for microbatch in ids.chunk(self.microbatches):
            loss = forward(self.model, microbatch)
            (loss / self.microbatches).backward()
            losses.append(loss.detach())
        return losses

    def evaluate(self, ids):
        """Mean loss of one batch."""
        with torch.no_grad():
            losses = [forward(self.model, microbatch) for microbatch in ids.chunk(self.microbatches)]
        return torch.stack(losses).mean().item()

    def state_dict(self):
        return self.model.state_dict()
