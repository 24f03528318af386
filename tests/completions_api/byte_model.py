"""A tiny Llama whose tokens are bytes and whose favourite text goes around in a circle.

Every character beyond ASCII takes several tokens. After a space the likeliest text is CIRCLE,
again and again; with a temperature other bytes come in between.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

CIRCLE = "😀é "  # no byte twice, so that each says what comes next
HIDDEN, LAYERS = 64, 4
CONTEXT = 1024


def make_byte_llama(folder: Path) -> Path:
    """Write model and tokenizer to `folder` and return it."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    ids = tokenizer.encode(CIRCLE, add_special_tokens=False)
    with torch.no_grad():
        rows = model.model.embed_tokens.weight.normal_()
        for now, following in zip(ids, [*ids[1:], ids[0]], strict=True):
            model.lm_head.weight[following] = rows[now] / rows[now].norm()
    disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
