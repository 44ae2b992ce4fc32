#!/usr/bin/env python3
"""Trains a small GPT on the CPU and survives kill -9 without reading a token twice or losing one.

    dquant tokenize docs --encoding r50k_base -o tokens/web.bin
    python train_gpt.py tokens/web.bin --checkpoint gpt.pt
    torchrun --nproc-per-node 8 train_gpt.py dq://127.0.0.1/web --checkpoint gpt.pt

Every --every steps the model, the optimizer and the position of the stream go into one file, atomically. Started
again with the same arguments, it goes on behind the last checkpoint: the tokens of every batch and the losses are
those of a run that was never killed, to the bit. `--source numpy` gathers the same batches with numpy, in an order
computed from docs/plan.md alone (bindings/python/tests/reference.py); the losses are the same again.

Several sources are blended: `dq://HOST/docs=3 dq://HOST/code=1`, or `a.bin=2/3 b.bin=1/3`. With several trainers each
gets its part of every batch, and gradients are averaged over them. A checkpoint may be resumed with another number of
trainers: the tokens of every batch stay the same.

With --evaluate 20 the model is evaluated every 20 steps, on the 5 % of the data that --split 95,5 keeps for it. What is in that
part depends on the data alone: killing, resuming and another number of trainers change nothing, and the model learns from none
of it.

Each step prints one line: its number, its loss, the loss as exact hexadecimal, and a digest of the batch's tokens.
"""

import argparse
import hashlib
import os
import sys
from fractions import Fraction
from pathlib import Path

import torch
from torch import distributed, nn

HEADS, LAYERS, WIDTH, CONTEXT = 4, 2, 64, 64


class Block(nn.Module):
    """Causal attention, then a layer for each token."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, x):
        samples, tokens, _ = x.shape
        qkv = self.qkv(self.before(x)).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(self.future[:tokens, :tokens], float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, tokens, WIDTH)
        x = x + self.out(mixed)
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    """Logits of the next token; the embedding is also the last layer."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.norm(self.blocks(hidden)) @ self.tokens.weight.T


class FromStream:
    """Batches of `dquant.Stream`: tensors over the ring, valid until the next step."""

    def __init__(self, sources, plans, steps, position):
        import dquant

        self.stream = dquant.Stream(sources, plans[0], batches=steps)
        if position is not None:
            self.stream.load_state_dict(position)
        # Iterating over it begins again each time.
        self.valid = dquant.Stream(sources, plans[1], evaluate=True) if plans[1] else ()

    def next(self):
        x, y = next(self.stream).torch()
        return x, y

    def evaluation(self):
        for batch in self.valid:
            yield batch.torch()
            del batch

    def position(self):
        return self.stream.state_dict()


class FromDataset:
    """Batches of `dquant.torch.TokenDataset`."""

    def __init__(self, sources, plans, steps, position):
        from dquant.torch import TokenDataset

        self.dataset = TokenDataset(sources, plans[0], batches=steps)
        self.valid = TokenDataset(sources, plans[1], epochs=1, repeat=True) if plans[1] else ()
        if position is not None:
            self.dataset.load_state_dict(position)
        self.batches = iter(torch.utils.data.DataLoader(self.dataset, batch_size=None))

    def next(self):
        return next(self.batches)

    def evaluation(self):
        return iter(torch.utils.data.DataLoader(self.valid, batch_size=None))

    def position(self):
        return self.dataset.state_dict()


class FromNumpy:
    """The same batches of local files of u32 tokens, without dquant."""

    def __init__(self, sources, plans, steps, position):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings/python/tests"))
        from reference import Reference

        blend = ", ".join(f'"{path}"={weight}' for path, weight in sources.items())
        files = [("u32", path) for path in sources]
        self.reference = Reference(f"{plans[0]} | blend({blend})", files)
        self.valid = Reference(f"{plans[1]} | blend({blend})", files) if plans[1] else None
        self.samples = int(plans[0].rsplit("batch(", 1)[1].rstrip(")"))
        self.sample = 0 if position is None else position["next_sample"]

    def next(self):
        number = self.sample // self.samples + rank()
        x, y = torch.from_numpy(self.reference.batch(number))
        self.sample += self.samples * trainers()
        return x, y

    def evaluation(self):
        every = sum(dataset.samples for dataset in self.valid.datasets) // self.samples // trainers()
        for step in range(every):
            yield torch.from_numpy(self.valid.batch(step * trainers() + rank()))

    def position(self):
        return {"next_sample": self.sample}


def rank():
    """This trainer's number."""
    return int(os.environ.get("RANK", "0"))


def trainers():
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def gathered(tensor):
    """The parts of all trainers, one after the other."""
    parts = [torch.empty_like(tensor) for _ in range(trainers())]
    distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def average(tensor):
    """The mean over all trainers, in place."""
    distributed.all_reduce(tensor)
    tensor /= trainers()


SOURCES = {"stream": FromStream, "dataset": FromDataset, "numpy": FromNumpy}


def loss_of(model, rows, x, y):
    """The mean loss of a batch. `%` makes new tensors: those of the stream are views of the ring."""
    return nn.functional.cross_entropy(model(x % rows).flatten(0, 1), (y % rows).flatten())


@torch.no_grad()
def evaluate(model, rows, batches):
    """The mean loss over an epoch of the validation data, of which each trainer takes a part."""
    losses = torch.stack([loss_of(model, rows, x, y) for x, y in batches])
    mean = losses.mean()
    if trainers() > 1:
        average(mean)
    return mean.item()


def save(path, checkpoint):
    """Replaces the file as a whole, so that a kill leaves the old one or the new one."""
    fresh = f"{path}.new"
    with open(fresh, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def train(args):
    """Runs to the last step, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    model = Gpt(args.rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, position = 0, None
    if args.checkpoint and os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first, position = checkpoint["step"], checkpoint["position"]
        if not rank():
            print(f"goes on behind step {first}", file=sys.stderr)
    elif args.checkpoint and not rank():
        print(f"no checkpoint in {args.checkpoint} yet: begins with step 1, saves every {args.every}", file=sys.stderr)
    if args.batch % trainers():
        sys.exit(f"{args.batch} samples cannot be shared by {trainers()} trainers")
    sample = f"window({CONTEXT + 1}, overlap=1) | narrow(u16) | widen(i64) | pairs"
    batch = f"batch({args.batch // trainers()})"
    plans = [f"{sample} | shuffle({args.seed}) | {batch}", None]
    if args.evaluate:
        # Each of them divides every source in the same way.
        train_part, valid_part = (f'split("{args.split}", part={part})' for part in ("train", "valid"))
        plans = [f"{sample} | shuffle({args.seed}) | {train_part} | {batch}", f"{sample} | {valid_part} | {batch}"]
    source = SOURCES[args.source](dict(args.sources), plans, args.steps, position)
    for step in range(first + 1, args.steps + 1):
        x, y = source.next()
        all_x, all_y = (gathered(x), gathered(y)) if trainers() > 1 else (x, y)
        digest = hashlib.sha256(all_x.numpy().tobytes() + all_y.numpy().tobytes()).hexdigest()[:16]
        loss = loss_of(model, args.rows, x, y)
        # The slot of the ring is free once its views are gone.
        del x, y, all_x, all_y
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if trainers() > 1:
            for tensor in [loss, *(parameter.grad for parameter in model.parameters())]:
                average(tensor)
        optimizer.step()
        valid = None
        if args.evaluate and step % args.evaluate == 0:
            valid = evaluate(model, args.rows, source.evaluation())
        if rank():
            continue
        print(f"{step} {loss.item():.4f} {loss.item().hex()} {digest}", flush=True)
        if valid is not None:
            print(f"valid {valid:.4f} {valid.hex()}", flush=True)
        if args.checkpoint and step % args.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.checkpoint, {**state, "step": step, "position": source.position()})


def weighted(text):
    """A source and its share of the samples."""
    name, _, weight = text.partition("=")
    try:
        return name, Fraction(weight or 1)
    except (ValueError, ZeroDivisionError):
        message = f"{weight!r} is no weight: give a number such as 0.5, or a fraction such as 1/3"
        raise argparse.ArgumentTypeError(message) from None


def main():
    parser = argparse.ArgumentParser(description="Trains a small GPT on the CPU.")
    parser.add_argument(
        "sources", nargs="+", type=weighted, metavar="NAME[=WEIGHT]", help="dq://HOST/NAME or a local file"
    )
    parser.add_argument("--source", choices=SOURCES, default="stream", help="where the batches come from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch, of all trainers")
    parser.add_argument("--seed", type=int, default=7, help="of the order and of the weights")
    parser.add_argument("--rows", type=int, default=4096, help="of the embedding: ids share rows (50257: one for each)")
    parser.add_argument("--checkpoint", help="file to write and to go on from")
    parser.add_argument("--evaluate", type=int, metavar="N", help="evaluate every N steps")
    parser.add_argument("--split", default="95,5", help="shares of training and validation, if the model is evaluated")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()
    if trainers() > 1:
        distributed.init_process_group("gloo")
    train(args)
    if trainers() > 1:
        # Threads of Gloo that live when the interpreter exits end the process with an error, now and then.
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
