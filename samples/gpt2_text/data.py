"""Text, tokenizer, batches, and the bigram model that the network has to beat.

The text is Python's own language reference as `pydoc` ships it, so that the sample needs no download.
"""

import pydoc_data.topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VALIDATION_PART = 0.1
# Candidates for the two weights of the bigram model; the best pair is chosen on text the model was not counted on.
BIGRAM_PRIORS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
UNIGRAM_PRIORS = (1.0, 10.0, 100.0)


def read_text():
    """All topics in sorted order, in one string: about 465,000 characters in Python 3.11."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def split_text(text, part=VALIDATION_PART):
    """Cuts `text` into (training, validation): the last `part` of it is validation, cut at a line end."""
    cut = text.rindex("\n", 0, int(len(text) * (1.0 - part))) + 1
    return text[:cut], text[cut:]


def train_tokenizer(text, vocabulary_size):
    """A byte-level BPE tokenizer learned from `text`; the same text gives the same tokenizer on every rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def encode(tokenizer, text):
    """Token ids of `text`: int64, shape [tokens]."""
    return torch.tensor(tokenizer.encode(text).ids, dtype=torch.int64)


class RandomWindows:
    """Endless training batches: windows of `length` tokens at random places of `ids`.

    The place comes from a generator of its own, so that every rank, and a run without the library, draws the same
    batches whatever else uses random numbers.
    """

    def __init__(self, ids, batch_size, length, seed):
        if len(ids) <= length:
            raise ValueError(
                f"The text has {len(ids)} tokens, too few for a window of {length}: "
                f"take a --length of at most {len(ids) - 1}."
            )
        self.ids, self.batch_size, self.length = ids, batch_size, length
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self):
        """Token ids, int64, shape [batch_size, length]."""
        starts = torch.randint(len(self.ids) - self.length + 1, (self.batch_size,), generator=self.generator)
        return torch.stack([self.ids[start : start + self.length] for start in starts.tolist()])


def validation_batches(ids, batch_size, length):
    """Consecutive windows of `length` tokens, int64, shape [batch_size, length]; an unfilled batch is left out."""
    count = len(ids) // (batch_size * length)
    if count == 0:
        raise ValueError(
            f"The validation text has {len(ids)} tokens; one batch of {batch_size} x {length} needs "
            f"{batch_size * length}: take a smaller --batch-size or --length."
        )
    return list(ids[: count * batch_size * length].view(count, batch_size, length))


class Bigram:
    """P(next | token), smoothed twice: counts of pairs lean on counts of single tokens, and those on equal chances.

        P(b | a) = (count(a, b) + k * P(b)) / (count(a) + k)
        P(b)     = (count(b) + j) / (tokens + j * vocabulary)

    (MacKay and Peto, "A hierarchical Dirichlet language model", 1995.) `k` and `j` are chosen on the last tenth of the
    training ids with the counts of the rest; then everything is counted again.
    """

    def __init__(self, ids, vocabulary_size):
        self.vocabulary_size = vocabulary_size
        cut = len(ids) * 9 // 10
        trials = []
        for bigram_prior in BIGRAM_PRIORS:
            for unigram_prior in UNIGRAM_PRIORS:
                table = self._count(ids[:cut], bigram_prior, unigram_prior)
                trials.append((_mean_loss(table, ids[cut:-1], ids[cut + 1 :]), bigram_prior, unigram_prior))
        _, self.bigram_prior, self.unigram_prior = min(trials)
        self.log_probability = self._count(ids, self.bigram_prior, self.unigram_prior)

    def _count(self, ids, bigram_prior, unigram_prior):
        size = self.vocabulary_size
        pairs = torch.bincount(ids[:-1] * size + ids[1:], minlength=size * size).view(size, size).double()
        single = torch.bincount(ids, minlength=size).double()
        unigram = (single + unigram_prior) / (len(ids) + unigram_prior * size)
        return ((pairs + bigram_prior * unigram) / (pairs.sum(1, keepdim=True) + bigram_prior)).log()

    def loss(self, batches):
        """Mean loss in nats for a token over the positions that the network is asked for in the same batches."""
        windows = torch.cat(batches)
        return _mean_loss(self.log_probability, windows[:, :-1].reshape(-1), windows[:, 1:].reshape(-1))


def _mean_loss(log_probability, first, second):
    return -log_probability[first, second].mean().item()
