"""A tiny random Llama with a tiny tokenizer, made on the spot: for tests where text is no matter.

The tokenizer knows <s>, </s>, <unk> and words "w3" to "w<vocab - 1>" split at spaces, so every
token id has a text and every text of such words its ids. It adds <s> in front, as Llama does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar


def make_tiny_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 256,
    context: int = 512,
    seed: int = 0,
) -> Path:
    """Write model and tokenizer to `folder` (made if need be) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(hidden // 4, 32),
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=False,
        # Larger than the default 0.02, so that layers and tokens differ clearly.
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return folder


def tiny_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Make the tokenizer of `vocab` words."""
    words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(3, vocab))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
