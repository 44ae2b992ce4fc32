"""What transformers makes of random conversations: ids and, for each, whether the assistant says it.

    python3 -m venv venv && venv/bin/pip install transformers jinja2
    venv/bin/python chat.py write FOLDER SEED

For every template in `templates/` and for each of two tokenizers, FOLDER/NAME/ gets what `save_pretrained` writes, and
beside it NAME.jsonl gets conversations and NAME.json what `apply_chat_template` says of each: ids and mask, or null where
it raises. Templates without generation blocks have no mask in transformers; theirs follows from rendering with it, one
message after another. Ends with code 77 where transformers is missing.
"""

import glob
import json
import os
import random
import sys

try:
    import jinja2
    import transformers
    from tokenizers import AddedToken, Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template
except ImportError as missing:
    print(missing)
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))
EACH = 40

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["[INST]", "[/INST]"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

PARTS = [
    "hello", " world", "It isn't", " ", "  ", "\n", "\n\n", "\r\n", "\t", "1234567", "…", "中文", "。", "é", "e\u0301",
    "😀", "👩‍👩‍👧", "\u3000", "\ufeff", "\u00a0", "\u001f", "ﬁ", "Ⅷ", "\u2028", "\ufdd0", "\ufdd1", "'", '"', "\\", "<b>&amp;",
    "{{ x }}", "{% raw %}", "dquant", "ſ", "\u0000", "\u007f", "<|im_end|>", "</s>", "[INST]", "<think>", "</think>",
    "<tool_response>", "</tool_response>", "\U00010348", "ÅSTRÖM", "ß",
]


def tokenizers():
    for name in ["bpe", "unigram"]:
        tokenizer = Tokenizer.from_file(os.path.join(HERE, name + ".json"))
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
        # The last is one whose offsets are unusual.
        tokenizer.add_special_tokens([AddedToken("<|user|>", normalized=False, lstrip=True, rstrip=True)])
        yield name, tokenizer


def text(rng, most=12):
    return "".join(rng.choice(PARTS) for _ in range(rng.randrange(most)))


def value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice([0, -1, 7, 2**40, 2**63])
    if kind == 1:
        return rng.choice([0.5, 1.0, 1e-7, 1.5e16, 123456.789, -0.0])
    if kind == 2:
        return rng.choice([True, False, None])
    if kind < 6:
        return text(rng, 5)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text(rng, 3): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def tool(rng):
    properties = {"a" + str(n): {"type": "string", "description": text(rng)} for n in range(rng.randrange(3))}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "f" + text(rng, 3), "parameters": parameters}}


def message(rng, role):
    found = {"role": role, "content": text(rng)}
    if role == "assistant":
        if rng.randrange(6) == 0:
            call = {"name": "f", "arguments": rng.choice([value(rng), {"x": value(rng)}])}
            found["tool_calls"] = [rng.choice([call, {"type": "function", "function": call}])]
            if rng.randrange(2):
                found["content"] = None
        if rng.randrange(6) == 0:
            found[rng.choice(["reasoning_content", "thinking", "reasoning"])] = rng.choice([text(rng), None])
        if rng.randrange(6) == 0:
            found["content"] = "<think>\n" + text(rng) + "\n</think>\n\n" + text(rng)
    if role == "user" and rng.randrange(20) == 0:
        found["content"] = [{"type": "text", "text": text(rng)}, {"type": "image"}]
    if rng.randrange(15) == 0:
        found["extra"] = value(rng)
    return found


def record(rng):
    roles = ["system"] if rng.randrange(3) == 0 else []
    for _ in range(rng.randrange(1, 5)):
        roles += ["user", "assistant"]
        if rng.randrange(6) == 0:
            roles += ["tool", "assistant"]
    if rng.randrange(6) == 0:
        roles = roles[:-1]
    if rng.randrange(12) == 0:
        rng.shuffle(roles)
    found = {"messages": [message(rng, role) for role in roles or ["user"]]}
    if rng.randrange(3) == 0:
        found["tools"] = rng.choice([None, [], [tool(rng) for _ in range(rng.randrange(1, 3))]])
    if rng.randrange(6) == 0:
        found["documents"] = [{"title": text(rng), "text": text(rng)}]
    if rng.randrange(4) == 0:
        found.update(rng.choice([{"date_string": text(rng)}, {"extra": value(rng)}, {"eos_token": "<|eot_id|>"}]))
    return found


class Refused(Exception):
    """A template that raises, or what comes of it."""


def apply(tokenizer, messages, rest, **options):
    try:
        return tokenizer.apply_chat_template(messages, **rest, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Refused(str(error)) from error


def begun(tokenizer, messages, rest):
    """The prompt for the assistant; of no messages, too, which `apply_chat_template` refuses."""
    if messages:
        return apply(tokenizer, messages, rest, tokenize=False, add_generation_prompt=True)
    try:
        rest = {**tokenizer.special_tokens_map, **rest}
        options = {"chat_template": tokenizer.chat_template, "add_generation_prompt": True}
        return render_jinja_template(conversations=[[]], **rest, **options)[0][0]
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Refused(str(error)) from error


def added(tokenizer, messages, rest):
    """The characters of each message of the assistant, by the rule for templates without generation blocks."""
    whole = apply(tokenizer, messages, rest, tokenize=False)
    spans = []
    for at, found in enumerate(messages):
        if found["role"] == "assistant":
            prompt = begun(tokenizer, messages[:at], rest)
            rendered = apply(tokenizer, messages[: at + 1], rest, tokenize=False)
            if not rendered.startswith(prompt) or not whole.startswith(rendered):
                raise Refused("no prefix")
            start = max(len(prompt), spans[-1][1] if spans else 0)
            if start < len(rendered):
                spans.append((start, len(rendered)))
    return spans


def expected(tokenizer, template, line):
    # What the model's files say, a record does not change: its own `eos_token` is left out.
    known = {"messages", *tokenizer.special_tokens_map}
    rest = {name: found for name, found in line.items() if name not in known}
    messages = line["messages"]
    options = {"tokenize": True, "return_dict": True}
    if "generation %}" in template or "generation -%}" in template:
        found = apply(tokenizer, messages, rest, return_assistant_tokens_mask=True, **options)
        return {"ids": found["input_ids"], "mask": found["assistant_masks"]}
    found = apply(tokenizer, messages, rest, **options)
    mask = [0] * len(found["input_ids"])
    for start, end in added(tokenizer, messages, rest):
        for at, (first, last) in enumerate(found.encodings[0].offsets):
            if first < end and last > start:
                mask[at] = 1
    return {"ids": found["input_ids"], "mask": mask}


def write(folder, seed):
    rng = random.Random(int(seed))
    for path in sorted(glob.glob(os.path.join(HERE, "templates/*.jinja"))):
        template = open(path, encoding="utf-8").read()
        for kind, raw in tokenizers():
            name = f"{os.path.basename(path)[:-6]}.{kind}"
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=template
            )
            tokenizer.save_pretrained(os.path.join(folder, name))
            lines = [record(rng) for _ in range(EACH)]
            results = []
            for line in lines:
                try:
                    results.append(expected(tokenizer, template, line))
                except Refused:
                    results.append(None)
            with open(os.path.join(folder, name + ".jsonl"), "w", encoding="utf-8") as out:
                out.writelines(json.dumps(line, ensure_ascii=rng.random() < 0.5) + "\n" for line in lines)
            with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as out:
                json.dump(results, out)
    print(transformers.__version__)


if __name__ == "__main__":
    {"write": write}[sys.argv[1]](*sys.argv[2:])
