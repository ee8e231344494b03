from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vmm_kv.demo.requests import read_text, requests_from
from vmm_kv.demo.sampling import checksum, sample


def test_requests_fit_and_reach_the_total() -> None:
    requests = requests_from(read_text(), longest=256, total_tokens=9000)
    assert sum(r.length for r in requests) >= 9000 > sum(r.length for r in requests[:-1])
    assert max(r.length for r in requests) <= 256
    assert len({r.prompt for r in requests}) == len(requests)
    assert len({r.new_tokens for r in requests}) > 1


def test_windows_are_bytes_of_the_text_and_overlap() -> None:
    text = read_text()
    first, second = requests_from(text, longest=64, total_tokens=100)[:2]
    assert bytes(first.prompt) == text[: len(first.prompt)]
    assert bytes(second.prompt[:4]) in text[: len(first.prompt)]


def test_a_short_text_goes_round() -> None:
    assert bytes(requests_from(b"abc", 16, 1)[0].prompt).startswith(b"abcabca")


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no text"):
        read_text(tmp_path / "empty")
    with pytest.raises(ValueError, match="at least 16"):
        requests_from(b"abc", 15, 1)


def test_sampling_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(4)]

    together = sample(logits, generators(), 1.0)
    alone = [sample(logits[i : i + 1], generators()[i : i + 1], 1.0)[0] for i in range(4)]
    assert together == alone


def test_sampling_follows_the_logits() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2, 0.0]]))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(logits, [generator], 1.0)[0] for _ in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.03, rtol=0)


def test_the_checksum_sees_the_last_bit() -> None:
    logits = torch.randn(3, 5)
    changed = logits.clone()
    changed.view(torch.int32)[2, 4] ^= 1
    assert checksum(logits) == checksum(logits.clone()) != checksum(changed)
    assert checksum(logits.T) != checksum(logits)
