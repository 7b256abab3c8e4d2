"""Trains a small GPT-2 on Python's language reference, its layers spread over two ranks.

mpirun -np 2 python samples/gpt2_text/train.py            train, draw the loss curve, save the weights
python samples/gpt2_text/train.py --plain                 the same training in one process, without the library
mpirun -np 2 python samples/gpt2_text/train.py --check    compare both, loss by loss, bit for bit
mpirun -np 2 python samples/gpt2_text/train.py --speed    compare their speed
"""

import argparse
import math
import pathlib
import signal
import sys
import time

import data
import matplotlib
import torch
from model import build_model, continue_text, parameter_count
from tqdm import tqdm

OUTPUT_FOLDER = pathlib.Path(__file__).parent / "outputs"


def read_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plain", action="store_true", help="train in one process, without the library")
    what.add_argument("--check", action="store_true", help="compare 20 steps with and without the library bit for bit")
    what.add_argument("--speed", action="store_true", help="compare the speed with and without the library")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--batch-size", type=int, default=8, help="windows in one step, over all microbatches")
    parser.add_argument("--length", type=int, default=128, help="tokens in one window")
    # A larger vocabulary needs more than a few minutes to learn which tokens follow each other at all.
    parser.add_argument("--vocabulary-size", type=int, default=320)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    # With 20, one step near the top of the learning rate throws the loss up by 3 for a moment.
    parser.add_argument("--warm-up-steps", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--validate-every", type=int, default=110, help="steps between two looks at the validation text"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.batch_size % options.microbatches:
        parser.error(
            f"--batch-size is {options.batch_size} but must be a multiple of --microbatches, {options.microbatches}: "
            f"take {options.microbatches * math.ceil(options.batch_size / options.microbatches)}"
        )
    return options


class Texts:
    """Tokenizer, training windows and validation batches: the same on every rank, since all have one seed."""

    def __init__(self, options):
        training_text, validation_text = data.split_text(data.read_text())
        self.tokenizer = data.train_tokenizer(training_text, options.vocabulary_size)
        self.training_ids = data.encode(self.tokenizer, training_text)
        validation_ids = data.encode(self.tokenizer, validation_text)
        self.windows = data.RandomWindows(self.training_ids, options.batch_size, options.length, options.seed)
        self.validation = data.validation_batches(validation_ids, options.batch_size, options.length)


def learning_rate_factor(step, warm_up_steps, steps):
    """Rises in a line over the warm-up, then falls along half a cosine to a tenth."""
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    progress = (step - warm_up_steps) / max(1, steps - warm_up_steps)
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(optimizer, options):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.warm_up_steps, options.steps)
    )


def validation_loss(run, batches):
    """Mean loss over all validation batches, in evaluation mode."""
    run.model.eval()
    losses = [run.evaluate(batch) for batch in batches]
    run.model.train()
    return sum(losses) / len(losses)


def train(run, texts, options):
    """Runs the loop; returns the training losses [(step, loss)] and the validation losses [(step, loss)]."""
    schedule = make_schedule(run.optimizer, options)
    training, validation = [], []
    run.model.train()
    with tqdm(total=options.steps, unit="step", disable=run.rank != 0) as bar:
        for step in range(1, options.steps + 1):
            started = time.perf_counter()
            ids = texts.windows.next_batch()
            losses = run.train(ids)
            run.optimizer.step()
            run.optimizer.zero_grad()
            schedule.step()
            loss = torch.stack(losses).mean().item()
            training.append((step, loss))
            tokens_per_second = ids.numel() / (time.perf_counter() - started)
            if step % options.validate_every == 0 or step == options.steps:
                validation.append((step, validation_loss(run, texts.validation)))
            known = {"validation": f"{validation[-1][1]:.3f}"} if validation else {}
            if run.rank == 0 and (step <= 3 or step % 20 == 0):
                tqdm.write(f"step {step}: loss {loss:.3f}", file=sys.stdout)
                sys.stdout.flush()
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{tokens_per_second:.0f}", **known)
            bar.update()
    return training, validation


def draw(training, validation, bigram_loss, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot(*zip(*training, strict=True), linewidth=1, label="training")
    axes.plot(*zip(*validation, strict=True), marker="o", label="validation")
    axes.axhline(bigram_loss, color="gray", linestyle="--", label="bigram model, validation")
    axes.set(xlabel="step", ylabel="loss (nats for a token)", title="GPT-2 on Python's language reference")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def train_and_report(run, texts, options):
    """Trains, prints what came out next to the bigram model, and leaves curve and weights in the output folder."""
    bigram = data.Bigram(texts.training_ids, options.vocabulary_size)
    bigram_loss = bigram.loss(texts.validation)
    if run.rank == 0:
        print(
            f"{parameter_count(run.model) / 1e6:.1f} M parameters, {len(texts.training_ids)} training tokens, "
            f"validation loss of the bigram model {bigram_loss:.3f}",
            flush=True,
        )
    started = time.perf_counter()
    training, validation = train(run, texts, options)
    seconds = time.perf_counter() - started
    weights = run.state_dict()  # Every rank takes part; the result is whole on every rank.
    if run.rank != 0:
        return
    OUTPUT_FOLDER.mkdir(exist_ok=True)
    torch.save(weights, OUTPUT_FOLDER / "weights.pt")
    texts.tokenizer.save(str(OUTPUT_FOLDER / "tokenizer.json"))
    draw(training, validation, bigram_loss, OUTPUT_FOLDER / "loss.png")
    print(f"trained {options.steps} steps in {seconds:.0f} s")
    print(f"validation loss {validation[-1][1]:.3f}, of the bigram model {bigram_loss:.3f}")
    print(f"saved weights.pt, tokenizer.json and loss.png in {OUTPUT_FOLDER}")
    # The saved weights are those of the plain model: no library is needed to use them.
    plain_model = build_model(options.vocabulary_size, options.length, 0.0, options.seed)
    plain_model.load_state_dict(torch.load(OUTPUT_FOLDER / "weights.pt"))
    print("a sample:", continue_text(plain_model, texts.tokenizer, 'The "with" statement', 60, options.seed))


def run_all(options):
    torch.set_num_threads(1)  # Several ranks share the cores of this machine.
    texts = Texts(options)
    model = build_model(options.vocabulary_size, options.length, options.dropout, options.seed)
    if options.plain:
        from plain import PlainRun

        train_and_report(PlainRun(options, model), texts, options)
        return 0
    # Imported here, so that --plain needs nothing but PyTorch.
    import checks
    import library

    library.start(options)
    if options.check:
        return checks.compare_losses(Texts, make_schedule, options)
    if options.speed:
        return checks.compare_speed(Texts, options)
    train_and_report(library.LibraryRun(options, model), texts, options)
    return 0


def main():
    # mpirun answers Ctrl-C with SIGTERM to all ranks: leave through the same door.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return run_all(read_options())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
