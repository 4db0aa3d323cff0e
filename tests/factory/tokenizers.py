"""Real tokenizer classes built in memory from a small vocabulary, so that no file or download is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 1024
"""Embedding rows that every text encoder of the factory has; no tokenizer here yields a higher id."""

WORDS = (
    "a an the of in on and with at by for from user assistant system describe image image: color shape size texture "
    "text background objects detail generate prompt video painting squirrel eating burger red fox running snow robot "
    "beach low quality bad blurry music drums piano"
).split()
"""Words that become few tokens; everything else is spelled out in bytes or characters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML in the small: text and image parts, optional generation prompt."""

QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens of the Qwen family, in the order of their ids here (0, 1, ...)."""


def _prefix_merges(words: Iterable[Iterable[str]]) -> list[tuple[str, str]]:
    """Byte-pair merges that build each word (a sequence of symbols) from left to right."""
    merges: dict[tuple[str, str], None] = {}
    for symbols in words:
        left, *rest = symbols
        for right in rest:
            merges[left, right] = None
            left += right
    return list(merges)


def _vocabulary(*parts: Iterable[str]) -> dict[str, int]:
    """Token -> id, in the order given, repeats dropped."""
    tokens = list(dict.fromkeys(token for part in parts for token in part))
    if len(tokens) > VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {len(tokens)} tokens, the text encoders only {VOCAB_SIZE} rows")
    return {token: index for index, token in enumerate(tokens)}


def _byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _characters() -> list[str]:
    return [chr(code) for code in range(33, 127)]


def build_clip_tokenizer(max_length: int = 77, pad_token: str = "<|endoftext|>") -> PreTrainedTokenizerBase:
    """CLIPTokenizer; the end token has the highest id, as in the original."""
    words = [[*word[:-1], word[-1] + "</w>"] for word in WORDS]
    merges = _prefix_merges(words)
    alphabet = _byte_alphabet()
    pad = [pad_token] if pad_token != "<|endoftext|>" else []
    vocab = _vocabulary(
        pad,
        alphabet,
        (symbol + "</w>" for symbol in alphabet),
        ("".join(pair) for pair in merges),
        ("<|startoftext|>", "<|endoftext|>"),
    )
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length, pad_token=pad_token)


def _unigram_pieces(specials: Iterable[str]) -> list[tuple[str, float]]:
    pieces = [(token, 0.0) for token in specials]
    pieces += [("▁", -4.0), *((character, -6.0) for character in _characters())]
    pieces += [(f"▁{word}", -2.0) for word in WORDS if len(word) > 1]
    return pieces


def build_t5_tokenizer(max_length: int = 64) -> PreTrainedTokenizerBase:
    """T5Tokenizer (unigram), used with T5 and UMT5 encoders."""
    pieces = _unigram_pieces(("<pad>", "</s>", "<unk>"))
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=max_length)


def build_qwen2_tokenizer(max_length: int = 512, extra: Iterable[str] = ()) -> PreTrainedTokenizerBase:
    """Qwen2Tokenizer with the chat and vision tokens and a small chat template."""
    merges = _prefix_merges(f"Ġ{word}" for word in WORDS)
    specials = [*QWEN_SPECIALS, *extra]
    vocab = _vocabulary(specials, _byte_alphabet(), ("".join(pair) for pair in merges))
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", model_max_length=max_length
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _fallback_vocabulary(specials: Iterable[str], merges: list[tuple[str, str]]) -> dict[str, int]:
    byte_tokens = (f"<0x{code:02X}>" for code in range(256))
    return _vocabulary(specials, byte_tokens, "▁", _characters(), ("".join(pair) for pair in merges))


def build_llama_tokenizer(max_length: int = 512, extra: Iterable[str] = (), **options: Any) -> PreTrainedTokenizerBase:
    """LlamaTokenizer with byte fallback, a pad token and a small chat template."""
    merges = _prefix_merges(f"▁{word}" for word in WORDS)
    specials = ["<unk>", "<s>", "</s>", "<pad>", *extra]
    tokenizer = transformers.LlamaTokenizerFast(
        vocab=_fallback_vocabulary(specials, merges),
        merges=merges,
        pad_token="<pad>",
        model_max_length=max_length,
        **options,
    )
    if extra:
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_gemma_tokenizer(max_length: int = 512) -> PreTrainedTokenizerBase:
    """GemmaTokenizer with byte fallback and a small chat template."""
    merges = _prefix_merges(f"▁{word}" for word in WORDS)
    vocab = _fallback_vocabulary(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), merges)
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_bert_tokenizer(max_length: int = 77) -> PreTrainedTokenizerBase:
    """BertTokenizer (word pieces)."""
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = _vocabulary(specials, _characters(), (f"##{character}" for character in _characters()), WORDS)
    return transformers.BertTokenizerFast(vocab=vocab, model_max_length=max_length)


def build_xlm_roberta_tokenizer(max_length: int = 77) -> PreTrainedTokenizerBase:
    """XLMRobertaTokenizer (unigram)."""
    pieces = _unigram_pieces(("<s>", "<pad>", "</s>", "<unk>"))
    return transformers.XLMRobertaTokenizerFast(vocab=pieces, model_max_length=max_length)


def build_roberta_tokenizer(max_length: int = 77) -> PreTrainedTokenizerBase:
    """RobertaTokenizer (byte-level pairs)."""
    merges = _prefix_merges(f"Ġ{word}" for word in WORDS)
    specials = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    vocab = _vocabulary(specials, _byte_alphabet(), ("".join(pair) for pair in merges))
    return transformers.RobertaTokenizerFast(vocab=vocab, merges=merges, model_max_length=max_length)


def build_gpt2_tokenizer(max_length: int = 77) -> PreTrainedTokenizerBase:
    """GPT2Tokenizer (byte-level pairs)."""
    merges = _prefix_merges(f"Ġ{word}" for word in WORDS)
    vocab = _vocabulary(("<|endoftext|>",), _byte_alphabet(), ("".join(pair) for pair in merges))
    return transformers.GPT2TokenizerFast(
        vocab=vocab, merges=merges, pad_token="<|endoftext|>", model_max_length=max_length
    )
