"""Chat prompts to token ids, by a checkpoint's own tokenizer and chat template.

Text never becomes a control token: only the template's own parts do. Sampled ids are never decoded
and encoded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from models.checkpoint_files import read_json
from models.config import CheckpointError
from models.hub import resolve_checkpoint

# Stand-ins for message contents when the template's own parts are wanted (private-use characters).
_SYSTEM_MARK = "\ue000system\ue001"
_USER_MARK = "\ue000user\ue001"
_OTHER_FILES = ("vocab.json", "tokenizer.model")  # of checkpoints without a tokenizer.json


class ChatTokenizer:
    """A tokenizer with its chat template and its stop ids.

    Attributes:
      folder: the local folder that it was loaded from.
      vocab_size: number of ids that the tokenizer knows, added ones included. The model may have
        more embedding rows; ids from ``vocab_size`` on must never be sampled.
      stop_ids: sorted union of the end ids that the tokenizer, ``config.json`` and
        ``generation_config.json`` declare.
      has_thinking_switch: whether the template reads ``enable_thinking``.
    """

    def __init__(self, path_or_hub_name: str | Path, *, revision: str | None = None):
        """Loads the tokenizer of a checkpoint folder or hub name; never runs a checkpoint's code.

        Raises:
          CheckpointError: there is no such checkpoint, or its tokenizer cannot be loaded, has no
            chat template, or declares no end id.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        folder = self.folder = resolve_checkpoint(
            path_or_hub_name, revision=revision, weights=False
        )
        # AutoTokenizer may rebuild a tokenizer by model type and then disagree with tokenizer.json.
        as_stored = (folder / "tokenizer.json").is_file()
        if not as_stored and not any((folder / name).is_file() for name in _OTHER_FILES):
            raise CheckpointError(f"{folder}: no tokenizer.json")
        loader = PreTrainedTokenizerFast if as_stored else AutoTokenizer
        try:
            self._hf = loader.from_pretrained(folder, trust_remote_code=False)
            backend = self._hf.backend_tokenizer
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{folder}: cannot load the tokenizer: {reason}") from None
        if not self._hf.chat_template:
            raise CheckpointError(f"{folder}: the tokenizer has no chat template")
        self.vocab_size = len(self._hf)
        self.stop_ids = _stop_ids(folder, self._hf.eos_token_id)
        self.has_thinking_switch = "enable_thinking" in self._hf.get_chat_template()
        self._whole: Tokenizer = backend
        self._whole.no_truncation()
        self._whole.no_padding()
        self._plain = _without_added_tokens(backend)
        self._added = {i: token.content for i, token in self._hf.added_tokens_decoder.items()}
        self._added_pattern = re.compile("|".join(map(re.escape, self._added.values())) or "(?!)")
        self._parts: dict[tuple[bool, bool], tuple[list[str], list[list[int]]]] = {}
        for token_id, content in self._added.items():
            if token_id in self.encode_text(content):
                raise CheckpointError(f"{folder}: cannot spell {content} without its control token")

    def encode_chat(self, system: str, user: str, *, thinking: bool = False) -> list[int]:
        """Ids of a chat of one system and one user message, ending with the generation prompt.

        An empty ``system`` leaves the system message out (some templates then add their own).
        Where no added-token string occurs in the messages, the ids are those of transformers'
        ``apply_chat_template``. Otherwise the template's parts and the messages are encoded
        separately, the messages without any added token.

        Args:
          thinking: passed as ``enable_thinking`` if the template has that switch; without thinking
            Qwen3's generation prompt holds an empty think block.
        """
        system, user = _valid_unicode(system), _valid_unicode(user)
        rendered = self._render(system, user, thinking)
        parts, part_ids = self._template_parts(bool(system), thinking)
        if not (self._has_added_token(system) or self._has_added_token(user)):
            ids = self._encode_with_added(rendered)
            # Added tokens could still appear across the border of a message and the template.
            if self._added_only(ids) == self._added_only(i for part in part_ids for i in part):
                return ids
        messages = [system, user] if system else [user]
        stripped = [message.strip() for message in messages]
        if rendered == _interleave(parts, stripped):  # as some templates do
            messages = stripped
        ids = list(part_ids[0])
        for message, part in zip(messages, part_ids[1:], strict=True):
            ids += self.encode_text(message) + part
        return ids

    def render_chat(self, system: str, user: str, *, thinking: bool = False) -> str:
        """The text that ``encode_chat`` encodes, for reading only."""
        return self._render(_valid_unicode(system), _valid_unicode(user), thinking)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, in which added-token strings are spelled out as ordinary text."""
        return self._plain.encode(_valid_unicode(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._whole.decode(list(ids), skip_special_tokens=True)

    def count_text(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode_text(text))

    def cut_text(self, text: str, limit: int, keep: Literal["last", "first"] = "last") -> str:
        """The longest end (or start) of ``text`` between token boundaries with <= ``limit`` tokens.

        Characters are never split.
        """
        text = _valid_unicode(text)
        encoding = self._plain.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= limit:
            return text
        # Encoded on its own, a piece may have another number of tokens than within the text.
        for count in range(limit, 0, -1):
            if keep == "last":
                piece = text[encoding.offsets[-count][0] :]
            else:
                piece = text[: encoding.offsets[count - 1][1]]
            if self.count_text(piece) <= limit:
                return piece
        return ""

    def _render(self, system: str, user: str, thinking: bool) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        switch: dict[str, Any] = {"enable_thinking": thinking} if self.has_thinking_switch else {}
        return self._hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **switch
        )

    def _template_parts(
        self, with_system: bool, thinking: bool
    ) -> tuple[list[str], list[list[int]]]:
        """The template's text before, between and after the messages, and its ids."""
        key = with_system, thinking
        if key not in self._parts:
            marks = [_SYSTEM_MARK, _USER_MARK] if with_system else [_USER_MARK]
            rendered = self._render(_SYSTEM_MARK if with_system else "", _USER_MARK, thinking)
            parts = re.split("|".join(marks), rendered)
            if len(parts) != len(marks) + 1:
                raise CheckpointError("the chat template does not show each message exactly once")
            self._parts[key] = parts, [self._encode_with_added(part) for part in parts]
        return self._parts[key]

    def _encode_with_added(self, text: str) -> list[int]:
        return self._whole.encode(text, add_special_tokens=False).ids

    def _has_added_token(self, text: str) -> bool:
        normalizer = self._whole.normalizer
        normalized = normalizer.normalize_str(text) if normalizer is not None else text
        return any(self._added_pattern.search(form) for form in (text, normalized))

    def _added_only(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if i in self._added]


def _stop_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    declared = [tokenizer_eos]
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            declared += value if isinstance(value, list) else [value]
    ids = tuple(sorted({i for i in declared if i is not None}))
    if not ids:
        raise CheckpointError(f"{folder}: neither tokenizer nor configs declare an end-of-text id")
    return ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = None
    return Tokenizer.from_str(json.dumps(spec))


def _interleave(parts: Sequence[str], messages: Sequence[str]) -> str:
    pieces = [parts[0]]
    for message, part in zip(messages, parts[1:], strict=True):
        pieces += [message, part]
    return "".join(pieces)


def _valid_unicode(text: str) -> str:
    """``text`` with lone surrogates, which no tokenizer can encode, as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
