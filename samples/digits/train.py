"""Classifies scikit-learn's handwritten digits with a small convolutional network over two ranks, in under a minute.

    export SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 4}'
    mpirun -np 2 python samples/digits/train.py

A training loop as scripts for `smdistributed.modelparallel` have it: it uses only names of that interface, and the
configuration comes from the environment. Accuracy on the test part ends above 90 %.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import smdistributed.modelparallel.torch as smp

TEST_IMAGES = 360  # of 1797
TARGET_ACCURACY = 0.9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.dropout1 = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.dropout2 = nn.Dropout(0.25)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@smp.step
def train_step(model, scaler, images, labels):
    output = model(images)
    loss = F.nll_loss(output, labels)
    model.backward(scaler.scale(loss))
    return output, loss


@smp.step
def test_step(model, images, labels):
    output = model(images)
    loss = F.nll_loss(output, labels, reduction="sum").item()
    correct = output.argmax(dim=1).eq(labels).sum().item()
    return loss, correct


def train(model, scaler, optimizer, loader, device, epoch):
    model.train()
    seen = correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        output_mb, loss_mb = train_step(model, scaler, images, labels)
        scaler.step(optimizer)
        scaler.update()
        loss = loss_mb.reduce_mean()
        seen += len(labels)
        correct += (output_mb.concat().argmax(dim=1) == labels).sum().item()
    if smp.rank() == 0:
        print(f"epoch {epoch}: last loss {loss.item():.4f}, training accuracy {correct / seen:.1%}", flush=True)


def test(model, loader, device):
    """Mean loss and accuracy on the test part; both are the same on every rank."""
    model.eval()
    loss, correct, seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            # What is no tensor comes back as a list with one entry for each microbatch.
            loss_mb, correct_mb = test_step(model, images.to(device), labels.to(device))
            loss += sum(loss_mb)
            correct += sum(correct_mb)
            seen += len(labels)
    return loss / seen, correct / seen


def load_parts():
    """(training, test) data sets of images [1, 8, 8] with values from 0 to 1 and labels 0 to 9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[TEST_IMAGES:], order[:TEST_IMAGES]
    # Each replica of the model trains on its own share.
    training = training[smp.dp_rank() :: smp.dp_size()]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_out], labels[held_out])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="PATH", help="where to save the state dict of the trained model")
    args, _ = parser.parse_known_args()  # A launcher may add arguments of its own.

    smp.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")

    training, held_out = load_parts()
    # All ranks of one model see the same batches: the order has a seed of its own.
    shuffle = torch.Generator().manual_seed(args.seed + smp.dp_rank())
    train_loader = DataLoader(training, args.batch_size, shuffle=True, drop_last=True, generator=shuffle)
    test_loader = DataLoader(held_out, TEST_IMAGES // 3)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)

    for epoch in range(1, args.epochs + 1):
        train(model, scaler, optimizer, train_loader, device, epoch)
    loss, accuracy = test(model, test_loader, device)
    if smp.rank() == 0:
        print(f"test loss {loss:.4f}, accuracy {accuracy:.1%}", flush=True)

    accuracies = smp.allgather(accuracy, smp.WORLD)
    assert all(other == accuracies[0] for other in accuracies), f"the ranks disagree about the accuracy: {accuracies}"
    assert accuracy > TARGET_ACCURACY, f"accuracy {accuracy:.1%}, but over {TARGET_ACCURACY:.0%} was expected"

    if args.save and smp.dp_rank() == 0:
        weights = model.state_dict()  # All ranks of this replica take part.
        if smp.rank() == 0:
            torch.save(weights, args.save)
    smp.barrier()


if __name__ == "__main__":
    main()
