"""Stand-ins for tokenizers and schedulers that a folder lacks: right in shape, not in content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

#: Tokens of a text, for each of its words (subword vocabularies of English text: about 4 tokens for 3 words).
TOKENS_PER_WORD = 4 / 3
#: What is a token at least: markers of chat templates, which pipelines cut off by their count, words, signs, line ends.
PIECES = re.compile(r"<\|[^|]*\|>|\w+|[^\w\s]|\n")
#: CLIP's text length, and T5's where a pipeline doesn't say (`max_sequence_length` of most calls).
CLIP_LENGTH, T5_LENGTH = 77, 512


class StandInTokens(dict[str, Any]):
    """What a tokenizer returns: tensors by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def to(self, device: Any, *_: Any, **__: Any) -> StandInTokens:
        """The same with every tensor moved."""
        return StandInTokens({k: v.to(device) if hasattr(v, "to") else v for k, v in self.items()})


class StandInTokenizer:
    """Gives token ids of the right count: the length asked for, else one that the text's words suggest.

    Args:
        length (`int`): The most tokens that the text encoder takes.
    """

    pad_token_id, eos_token_id, bos_token_id = 0, 1, 2
    pad_token, eos_token, bos_token = "<pad>", "</s>", "<s>"
    padding_side = "right"
    unique_no_split_tokens: tuple[str, ...] = ()

    def __init__(self, length: int) -> None:
        self.model_max_length = length

    def __len__(self) -> int:
        return 1

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """No added tokens."""
        return {}

    def __call__(
        self,
        text: str | list[str],
        *_: Any,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        **__: Any,
    ) -> StandInTokens:
        """Tokenizes in shape."""
        texts = [text] if isinstance(text, str) else list(text)
        most = max_length or self.model_max_length
        counts = [_count(str(t)) + 2 for t in texts]
        length = most if padding == "max_length" else max(counts)
        length = min(length, most) if truncation or padding == "max_length" else length
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, count in enumerate(counts):
            ids[row, : min(count, length)] = 3
            ids[row, min(count, length) - 1] = self.eos_token_id
            mask[row, : min(count, length)] = 1
        if return_tensors is None:
            tokens: list[Any] = (
                [ids[0].tolist(), mask[0].tolist()] if isinstance(text, str) else [ids.tolist(), mask.tolist()]
            )
            return StandInTokens(input_ids=tokens[0], attention_mask=tokens[1])
        return StandInTokens(input_ids=ids, attention_mask=mask)

    def apply_chat_template(self, messages: Any, *_: Any, tokenize: bool = True, **options: Any) -> Any:
        """The messages' text, tokenized unless asked not to."""
        text = json.dumps(messages, default=str)
        return self(text, **options) if tokenize else text

    def tokenize(self, text: str, **_: Any) -> list[str]:
        """Words."""
        return text.split()

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        """An id for each token."""
        return 3 if isinstance(tokens, str) else [3] * len(tokens)

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        """No text."""
        return [""] * len(ids)

    def decode(self, ids: Any, **_: Any) -> str:
        """No text."""
        return ""


def _count(text: str) -> int:
    return max(int(len(text.split()) * TOKENS_PER_WORD), len(PIECES.findall(text)))


def stand_in(name: str, kind: str, place: Path, notes: list[str]) -> Any:
    """What takes the place of a component without weights that can't be loaded; None where nothing can.

    Args:
        name (`str`): The component's name in the pipeline.
        kind (`str`): Its class.
        place (`Path`): Its folder; a text encoder's config beside it tells the length.
        notes (`list[str]`): Gets a line that says what is assumed.
    """
    if "Tokenizer" in kind:
        length = _length(kind, place.with_name(name.replace("tokenizer", "text_encoder")))
        notes.append(f"{name}: texts are taken to have up to {length} tokens")
        return StandInTokenizer(length)
    if "Scheduler" in kind:
        import diffusers

        cls = getattr(diffusers, kind, None)
        if cls is not None:
            notes.append(f"{name}: {kind} with its default options")
            return cls()
    notes.append(f"{name}: left out, since {kind} has no stand-in")
    return None


def _length(kind: str, encoder: Path) -> int:
    try:
        config = json.loads((encoder / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    found = config.get("max_position_embeddings")
    if "T5" in kind or found is None:
        return CLIP_LENGTH if "CLIP" in kind else T5_LENGTH
    return min(int(found), T5_LENGTH)
