"""Chat prompts to token ids, by a checkpoint's own tokenizer and chat template.

Text never becomes a control token: only the template's own parts do. Sampled ids are never decoded
and encoded again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from models.checkpoint_files import SIDE_FILES, check_checkpoint_file, read_json, read_text
from models.config import CheckpointError
from models.hub import resolve_checkpoint

# Stand-ins for message contents when the template's own parts are wanted (private-use characters).
_SYSTEM_MARK = "\ue000system\ue001"
_USER_MARK = "\ue000user\ue001"
_MARKS = f"{_SYSTEM_MARK}|{_USER_MARK}"
TOKENIZER = "tokenizer.json"
_OTHER_FILES = ("vocab.json", "tokenizer.model")  # of checkpoints without a tokenizer.json

logger = logging.getLogger(__name__)
# What transformers says at its import to those who want its models; nothing here does.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)


class ChatTokenizer:
    """A tokenizer with its chat template and its stop ids.

    Attributes:
        folder: The local folder that it was loaded from.
        vocab_size: Number of ids that the tokenizer knows, added ones included. The model may have
            more embedding rows; ids from ``vocab_size`` on must never be sampled.
        stop_ids: Sorted union of the end ids that the tokenizer, ``config.json`` and
            ``generation_config.json`` declare.
        special_tokens: Texts of the tokens that ``decode`` leaves out.
        has_thinking_switch: Whether the template reads ``enable_thinking``.

    A template that takes no system message gets the system text in the user's turn, before the
    user's own text and a blank line; loading says so.
    """

    def __init__(self, path_or_hub_name: str | Path, *, revision: str | None = None):
        """Loads the tokenizer of a checkpoint folder or hub name; never runs a checkpoint's code.

        Raises:
            CheckpointError: There is no such checkpoint, or its tokenizer cannot be loaded, has no
                chat template or one that does not take a user's message, or declares no end id.
        """
        folder = self.folder = resolve_checkpoint(
            path_or_hub_name, revision=revision, weights=False
        )
        self._hf = _load(folder)
        backend = self._hf.backend_tokenizer
        self.vocab_size = len(self._hf)
        self.stop_ids = _stop_ids(folder, self._hf.eos_token_id, self.vocab_size)
        self.has_thinking_switch = "enable_thinking" in _template(folder, self._hf)
        self._backend: Tokenizer = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._plain = _without_added_tokens(backend)
        self._added = {i: token.content for i, token in self._hf.added_tokens_decoder.items()}
        self.special_tokens = frozenset(
            token.content for token in self._hf.added_tokens_decoder.values() if token.special
        )
        self._added_pattern = re.compile("|".join(map(re.escape, self._added.values())) or "(?!)")
        for token_id, content in self._added.items():
            if token_id in self.encode_text(content):
                raise CheckpointError(f"{folder}: cannot spell {content} without its control token")
        self._merges_system = False
        self._parts = self._template_parts(with_system=False)
        try:
            self._parts |= self._template_parts(with_system=True)
        except CheckpointError as error:
            self._merges_system = True
            logger.warning("%s; system text is put before the user's", error)

    def encode_chat(self, system: str, user: str, *, thinking: bool = False) -> list[int]:
        """Ids of a chat of one system and one user message, ending with the generation prompt.

        An empty ``system`` leaves the system message out (some templates then add their own).
        Where no added-token string occurs in the messages, the ids are those of transformers'
        ``apply_chat_template``. Otherwise the template's parts and the messages are encoded
        separately, the messages without any added token.

        Args:
            system: The system message, or an empty text.
            user: The user's message.
            thinking: Passed as ``enable_thinking`` if the template has that switch; without
                thinking Qwen3's generation prompt holds an empty think block.
        """
        system, user = self._messages(system, user)
        rendered = self._render(system, user, thinking)
        parts, part_ids = self._parts[bool(system), thinking and self.has_thinking_switch]
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
        return self._render(*self._messages(system, user), thinking)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, in which added-token strings are spelled out as ordinary text."""
        return self._plain.encode(_valid_unicode(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, without special tokens unless ``special``."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def count_text(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode_text(text))

    def cut_text(self, text: str, limit: int, keep: Literal["last", "first"] = "last") -> str:
        """The longest end (or start) of a text that has at most ``limit`` tokens.

        It is cut at a token boundary; characters are never split.

        Args:
            text: The text to shorten.
            limit: Tokens, when what is kept is encoded on its own.
            keep: Which end of the text is kept.
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

    def _messages(self, system: str, user: str) -> tuple[str, str]:
        """The messages as the template takes them, in valid Unicode."""
        system, user = _valid_unicode(system), _valid_unicode(user)
        if system and self._merges_system:
            return "", f"{system}\n\n{user}"
        return system, user

    def _render(self, system: str, user: str, thinking: bool) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        switch: dict[str, Any] = {"enable_thinking": thinking} if self.has_thinking_switch else {}
        try:
            return self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **switch
            )
        except Exception as error:  # whatever the checkpoint's template raises
            roles = " and a ".join(message["role"] for message in messages)
            raise CheckpointError(
                f"{self.folder}: the chat template does not take a {roles} message: "
                f"{_first_line(error)}"
            ) from None

    def _template_parts(
        self, with_system: bool
    ) -> dict[tuple[bool, bool], tuple[list[str], list[list[int]]]]:
        """The template's text before, between and after the messages, and its ids.

        Returns:
            By (with_system, thinking).

        Raises:
            CheckpointError: The template does not show each message once.
        """
        found = {}
        marks = [_SYSTEM_MARK, _USER_MARK] if with_system else [_USER_MARK]
        for thinking in {False, self.has_thinking_switch}:
            rendered = self._render(_SYSTEM_MARK if with_system else "", _USER_MARK, thinking)
            if re.findall(_MARKS, rendered) != marks:
                what = "a system and a user message" if with_system else "a user message"
                raise CheckpointError(
                    f"{self.folder}: the chat template does not show {what} once each, in order"
                )
            parts = re.split(_MARKS, rendered)
            found[with_system, thinking] = parts, [self._encode_with_added(part) for part in parts]
        return found

    def _encode_with_added(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _has_added_token(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        normalized = normalizer.normalize_str(text) if normalizer is not None else text
        return any(self._added_pattern.search(form) for form in (text, normalized))

    def _added_only(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if i in self._added]


def _load(folder: Path) -> Any:
    """transformers' tokenizer of a folder, from ``tokenizer.json`` as it is stored."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer may rebuild a tokenizer by model type and then disagree with tokenizer.json.
    as_stored = os.path.lexists(folder / TOKENIZER)
    if not as_stored and not any((folder / name).is_file() for name in _OTHER_FILES):
        raise CheckpointError(f"{folder}: no {TOKENIZER}")
    for path in (folder / name for name in SIDE_FILES):
        if os.path.lexists(path):
            if path.suffix == ".json" and path.name not in (TOKENIZER, "vocab.json"):
                read_json(path)
            elif path.suffix in (".jinja", ".txt"):
                read_text(path)
            else:  # large, or not text
                check_checkpoint_file(path)
    loader = PreTrainedTokenizerFast if as_stored else AutoTokenizer
    try:
        loaded = loader.from_pretrained(folder, trust_remote_code=False)
        loaded.backend_tokenizer  # noqa: B018 (a tokenizer in Python has none)
    except Exception as error:  # tokenizers raises bare Exceptions for files that it cannot read
        where = folder / TOKENIZER if as_stored else folder
        raise CheckpointError(f"{where}: cannot load the tokenizer: {_first_line(error)}") from None
    return loaded


def _template(folder: Path, hf: Any) -> str:
    """The default chat template."""
    templates = hf.chat_template
    if not templates:
        raise CheckpointError(f"{folder}: the tokenizer has no chat template")
    if isinstance(templates, dict):
        if "default" not in templates:
            names = ", ".join(map(str, templates))
            raise CheckpointError(f"{folder}: no chat template is the default one of {names}")
        templates = templates["default"]
    if not isinstance(templates, str):
        raise CheckpointError(f"{folder}: the chat template is no text")
    return templates


def _stop_ids(folder: Path, tokenizer_eos: int | None, vocab_size: int) -> tuple[int, ...]:
    declared = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in ("config.json", "generation_config.json"):
        if not os.path.lexists(folder / name):
            continue
        value = read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id must be ids from 0 to {vocab_size - 1}, "
                f"got {reprlib.repr(value)}"
            )
        declared += ids
    if not declared:
        raise CheckpointError(f"{folder}: neither tokenizer nor configs declare an end-of-text id")
    return tuple(sorted(set(declared)))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
