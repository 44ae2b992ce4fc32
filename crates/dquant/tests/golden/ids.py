"""The ids of other libraries: made once, checked in, and compared when the libraries are there.

    python3 -m venv venv && venv/bin/pip install tiktoken==0.14.0 tokenizers==0.23.3
    venv/bin/python ids.py make                          # writes bpe.json, unigram.json, ids.json
    venv/bin/python ids.py check                         # ids.json is what the libraries say today
    venv/bin/python ids.py compare NAME DOCS.jsonl IDS.bin   # every document of a run
    venv/bin/python ids.py race DOCS.jsonl DQUANT        # cl100k_base, two threads each, in turns

The two tokenizers are trained on the documents of this repository. Ranks of tiktoken come from the folder of the
crate tiktoken-rs, because tiktoken itself would download them.
"""

import base64
import glob
import json
import os
import struct
import subprocess
import sys
import tempfile
import time

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../../../..")

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
PATTERNS = {"r50k_base": GPT2, "p50k_base": GPT2, "cl100k_base": GPT4, "o200k_base": GPT4O}

CASES = [
    "hello world",
    "It isn't 1234567 words,\r\nbut\tsome; we'LL see they'Re SHOUTING'S.",
    "   leading, trailing   ",
    "\n\n\ndef f(x):\n    return x**2  # ²\n\n",
    "naïve café — “quotes” … ﬁ ﬂ Ⅷ",
    "中文。日本語のテキスト、한국어 العربية עברית हिन्दी",
    "😀👩‍👩‍👧‍👦 e\u0301 \u200d\u00a0\u3000\u2028x",
    "<|endoftext|> and [UNK] and </s> are plain text",
    "\ufeffmark",
    "a" * 300,
    " " * 50 + "x" + "\n" * 50 + "y",
    "ſtraße 'ſ x'ſ İi ǅ",
    "/slash//\n/r/n\r\n/ =>!=",
    "0 00 000 0000 3.14 1,000,000 ٣ ½",
    "\u0000\u0001\u007f",
]


def prose():
    names = ["README.md", "ARCHITECTURE.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
    return [open(os.path.join(ROOT, name), encoding="utf-8").read() for name in names]


def train():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(
        prose(), trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    )
    # A token that is not special is found in the text; truncation must not happen.
    bpe.add_tokens([AddedToken("dquant", normalized=False)])
    bpe.enable_truncation(max_length=4)
    bpe.save(os.path.join(HERE, "bpe.json"))
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\t", " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.train_from_iterator(
        prose(),
        trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>", "</s>"], unk_token="<unk>"),
    )
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    unigram.post_processor = template
    unigram.enable_padding(length=64)
    unigram.save(os.path.join(HERE, "unigram.json"))


class Batches:
    """An encoding of tiktoken: one text, or a list of them on two threads."""

    def __init__(self, encoding):
        self.batch = lambda texts: encoding.encode_ordinary_batch(texts, num_threads=2)
        self.one = encoding.encode_ordinary

    def __call__(self, text):
        return self.one(text)


def encoder(name):
    """A function from text to ids: plain text, nothing added."""
    if name in PATTERNS:
        home = os.environ.get("CARGO_HOME", os.path.expanduser("~/.cargo"))
        found = glob.glob(f"{home}/registry/src/*/tiktoken-rs-0.12.1/assets/{name}.tiktoken")
        lines = open(found[0], "rb").read().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
        encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
        return Batches(encoding)
    tokenizer = Tokenizer.from_file(os.path.join(HERE, name))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


NAMES = [*PATTERNS, "bpe.json", "unigram.json"]


def golden():
    ids = {name: [encoder(name)(text) for text in CASES] for name in NAMES}
    return {"texts": CASES, "ids": ids}


def texts_of(documents):
    texts = [json.loads(line)["text"] for line in open(documents, encoding="utf-8") if line.strip()]
    return [text for text in texts if text]


def compare(name, documents, output):
    """Each document of a run, whose end is one id, against the library."""
    encode = encoder(name)
    ids = open(output, "rb").read()
    ids = struct.unpack(f"<{len(ids) // 4}I", ids)
    index = open(output.removesuffix(".bin") + ".idx", "rb").read()
    (sequences,) = struct.unpack_from("<Q", index, 18)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    texts = texts_of(documents)
    assert len(texts) == sequences, (len(texts), sequences)
    start = 0
    for text, length in zip(texts, lengths):
        ours, theirs = list(ids[start : start + length - 1]), encode(text)
        assert ours == theirs, (text, ours, theirs)
        start += length
    print(f"{name}: {sequences} documents, {start} tokens are equal")


def race(documents, program):
    """MB/s of text. Ours reads the file, parses it and writes the output; tiktoken has the texts in memory."""
    texts, batch = texts_of(documents), encoder("cl100k_base").batch
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "a.bin")
        line = [program, "tokenize", documents, "--encoding", "cl100k_base", "--jobs", "2", "--force", "-o", output]
        for _ in range(5):
            start = time.perf_counter()
            batch(texts)
            middle = time.perf_counter()
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
            end = time.perf_counter()
            theirs, ours = megabytes / (middle - start), megabytes / (end - middle)
            print(f"{megabytes:.0f} MB: tiktoken {theirs:.1f} MB/s, dquant {ours:.1f} MB/s, ratio {ours / theirs:.1f}")
        compare("cl100k_base", documents, output)


if __name__ == "__main__":
    path = os.path.join(HERE, "ids.json")
    match sys.argv[1:]:
        case ["make"]:
            train()
            with open(path, "w", encoding="utf-8") as file:
                json.dump(golden(), file, separators=(",", ":"))
                file.write("\n")
        case ["check"]:
            assert json.load(open(path, encoding="utf-8")) == golden(), "ids.json differs"
        case ["compare", name, documents, output]:
            compare(name, documents, output)
        case ["race", documents, program]:
            race(documents, program)
        case _:
            sys.exit(__doc__)
