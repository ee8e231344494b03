"""Turns a text into requests: overlapping windows of its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path

# Sixteenths of the longest sequence. Several lengths, so that requests come and go and many batch sizes occur.
_PROMPT_LENGTHS = (9, 12, 7, 13, 10, 6, 11, 8)
_ANSWER_LENGTHS = (2, 3, 1, 2, 3)
LEAST_LONGEST = 16
"""Tokens: below it a sixteenth of the longest sequence is none."""


@dataclass(frozen=True)
class Request:
    """`prompt`: token ids. `new_tokens`: how many to generate. `seed`: of its sampling."""

    prompt: tuple[int, ...]
    new_tokens: int
    seed: int

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return len(self.prompt) + self.new_tokens


def read_text(path: str | Path | None = None) -> bytes:
    """The prompts file, the bundled one if `path` is None. Raises `ValueError` if it is empty."""
    source = files(__package__).joinpath("prompts.txt") if path is None else Path(path)
    text = source.read_bytes()
    if not text:
        raise ValueError(f"{source}: no text to take prompts from")
    return text


def requests_from(text: bytes, longest: int, total_tokens: int) -> list[Request]:
    """Requests of at most `longest` tokens each, enough of them to reach `total_tokens`."""
    if longest < LEAST_LONGEST:
        raise ValueError(f"sequences of at most {longest} tokens: at least {LEAST_LONGEST} are needed")
    requests: list[Request] = []
    tokens = start = 0
    for prompt, answer in zip(cycle(_PROMPT_LENGTHS), cycle(_ANSWER_LENGTHS), strict=False):
        if tokens >= total_tokens:
            break
        length = longest * prompt // 16
        # The text goes round, so a short one gives long prompts too.
        window = tuple(islice(cycle(text), start, start + length))
        requests.append(Request(window, longest * answer // 16, seed=len(requests)))
        tokens += requests[-1].length
        start = (start + length // 2) % len(text)
    return requests
