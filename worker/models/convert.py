"""Turns a GGUF file into what vLLM and the catalog read: bf16 safetensors and tokenizer.json.

The only module of this package that imports torch and transformers, and it does so inside its
functions: finding that a model is already there must take no second.
"""

import os
from pathlib import Path


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer of `gguf` into `folder`.

    Takes about 20 s and 1 GiB of memory for 135 million weights.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file; no look-ups
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights come out readable for their owner alone


def export_tokenizer(folder: Path, target: Path) -> bool:
    """Write the tokenizer as transformers builds it, when `folder`'s own file means another.

    Some families change tokenizer.json while they load it. Returns False, and writes nothing,
    when the file already gives the same ids for texts that tell the known differences apart.
    """
    from transformers import AutoTokenizer

    from app.catalog import CatalogError, Tokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    try:
        ours = Tokenizer(folder)
        if all(ours.encode(text) == reference.encode(text) for text in PROBES):
            return False
    except CatalogError:
        pass  # no tokenizer.json: it is made from the slow tokenizer's files below
    target.mkdir(parents=True, exist_ok=True)
    reference.save_pretrained(target)
    return True


PROBES = (
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces\n\n\tand a tab",
    "Grüße, 你好, пока, 🙂 e\u0301",
    "def f(x):\n    return x**2  # 12345.678",
    "<s> </s> <|endoftext|> <|im_start|>user\nHi<|im_end|>",
)
