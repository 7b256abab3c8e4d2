"""The training with the library next to the same training without it: equal results, and how fast each is."""

import os
import statistics
import time

import library
import torch
from model import build_model
from plain import PlainRun

import smp

CHECK_STEPS = 20
SPEED_REPEATS = 5
SPEED_STEPS = 3  # steps in one measurement


def steps_of(run, make_texts, make_schedule, options):
    """Trains `CHECK_STEPS` steps; returns for each the losses of its microbatches."""
    texts = make_texts(options)
    schedule = make_schedule(run.optimizer, options)
    steps = []
    for _ in range(CHECK_STEPS):
        steps.append([loss.detach().clone() for loss in run.train(texts.windows.next_batch())])
        run.optimizer.step()
        run.optimizer.zero_grad()
        schedule.step()
    return steps


def compare_losses(make_texts, make_schedule, options):
    """Returns 0 where every loss of every microbatch and every weight after the last step has the same bits, else 1.

    Collective: all ranks train with the library, then rank 0 alone trains without it and tells the others the result.
    """
    options.dropout = 0.0  # Random numbers are drawn in another order when layers run on several ranks.
    run = library.LibraryRun(options, new_model(options))
    library_steps = steps_of(run, make_texts, make_schedule, options)
    library_weights = run.state_dict()
    equal = True
    if run.rank == 0:
        plain = PlainRun(options, new_model(options))
        plain_steps = steps_of(plain, make_texts, make_schedule, options)
        equal = print_losses(plain_steps, library_steps)
        plain_weights = plain.state_dict()
        different = [name for name, value in plain_weights.items() if not torch.equal(value, library_weights[name])]
        print(f"weights after step {CHECK_STEPS}:", f"different in {different}" if different else "equal")
        equal = equal and not different
        print("equal bit for bit" if equal else "NOT EQUAL", flush=True)
    return 0 if all(smp.allgather(equal, smp.WORLD)) else 1


def print_losses(plain_steps, library_steps):
    """The table; returns whether all losses are equal."""
    print(f"{'step':>4} {'plain':>12} {'library':>12}  equal microbatches")
    equal = True
    for step, (plain, library_losses) in enumerate(zip(plain_steps, library_steps, strict=True), 1):
        same = sum(torch.equal(a, b) for a, b in zip(plain, library_losses, strict=True))
        means = [torch.stack(losses).mean().item() for losses in (plain, library_losses)]
        print(f"{step:>4} {means[0]:12.8f} {means[1]:12.8f}  {same} of {len(plain)}")
        equal = equal and same == len(plain)
    return equal


def compare_speed(make_texts, options):
    """Measures all ways in turn, several times, and prints medians. Collective. Returns 0."""
    windows = make_texts(options).windows
    run = library.LibraryRun(options, new_model(options))
    ranks = smp.size()
    # mpirun ties each rank to a core of its own; the plain process may use all of those that the ranks use.
    own_cores = os.sched_getaffinity(0)
    all_cores = set().union(*smp.allgather(own_cores, smp.WORLD))
    library_name = f"library, {ranks} ranks of 1 thread"
    thread_counts = sorted({1, ranks})
    plain_names = {count: f"plain, 1 process of {count} thread{'s'[: count - 1]}" for count in thread_counts}
    together_name = f"plain, {ranks} processes at once"
    speeds = {name: [] for name in (library_name, *plain_names.values(), together_name)}
    plain = PlainRun(options, new_model(options))
    waiting_shares = []

    for repeat in range(SPEED_REPEATS + 1):  # The first one only warms up.
        measured = {library_name: tokens_per_second(run, windows, smp.barrier)}
        # Each rank trains a model of its own: what the cores give when nobody waits for anybody.
        measured[together_name] = ranks * tokens_per_second(plain, windows, smp.barrier)
        waiting_from, processor_from = time.perf_counter(), time.process_time()
        if run.rank == 0:
            os.sched_setaffinity(0, all_cores)
            for count, name in plain_names.items():
                torch.set_num_threads(count)
                measured[name] = tokens_per_second(plain, windows, lambda: None)
            torch.set_num_threads(1)
            os.sched_setaffinity(0, own_cores)
        smp.barrier()
        waiting_shares.append((time.process_time() - processor_from) / (time.perf_counter() - waiting_from))
        if repeat and run.rank == 0:
            for name, value in measured.items():
                speeds[name].append(value)

    others_shares = smp.allgather(max(waiting_shares), smp.WORLD)[1:]
    if run.rank == 0:
        print_speeds(speeds, library_name, others_shares)
        # A pipeline fills and drains in every step: m microbatches take at least the time of m + p - 1.
        m, p = options.microbatches, options.partitions
        bound = statistics.median(speeds[together_name]) * m / (m + p - 1)
        share = statistics.median(speeds[library_name]) / bound
        print(f"bound of a pipeline on these cores {bound:.0f} tokens/s, reached {share:.0%}", flush=True)
    return 0


def tokens_per_second(run, windows, wait_for_all):
    """Speed of `SPEED_STEPS` whole steps, optimizer included."""
    batches = [windows.next_batch() for _ in range(SPEED_STEPS)]
    wait_for_all()
    started = time.perf_counter()
    for ids in batches:
        run.train(ids)
        run.optimizer.step()
        run.optimizer.zero_grad()
    wait_for_all()
    return sum(ids.numel() for ids in batches) / (time.perf_counter() - started)


def print_speeds(speeds, library_name, others_shares):
    print(f"tokens/s, median (lowest - highest) of {SPEED_REPEATS} measurements of {SPEED_STEPS} steps each")
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:32} {medians[name]:8.0f}  ({min(values):.0f} - {max(values):.0f})")
    for name, median in medians.items():
        if name != library_name:
            print(f"library / {name:22} {medians[library_name] / median:8.2f}")
    # A rank that waits and yet computes would slow the plain process down and flatter the library.
    if others_shares:
        print(
            f"processor use of a waiting rank while the plain process ran: at most {max(others_shares):.0%}", flush=True
        )


def new_model(options):
    return build_model(options.vocabulary_size, options.length, options.dropout, options.seed)
