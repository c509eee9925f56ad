"""What a process wears when it starts: its host's namespace, and what a scenario put on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.testing.chaos.scene import Wardrobe

ARGV = ["python", "-m", "kvferry.cli.main", "engine", "--socket-dir", "/tmp/sockets"]


def test_a_process_without_a_home_wears_only_what_it_was_given() -> None:
    wardrobe = Wardrobe()
    assert wardrobe("decode-0", ARGV) == ARGV
    wardrobe.wear("decode-0", lambda argv: ["prlimit", *argv])
    assert wardrobe("decode-0", ARGV) == ["prlimit", *ARGV]
    assert wardrobe("decode-1", ARGV) == ARGV
    wardrobe.wear("decode-0", None)
    assert wardrobe("decode-0", ARGV) == ARGV


def test_at_home_it_listens_there_and_does_not_see_the_others_sockets() -> None:
    home: Any = SimpleNamespace(
        address="198.18.0.2", kv_address="198.18.0.9", dress=lambda hidden: ["enter", *hidden]
    )
    wardrobe = Wardrobe({"decode-0": home})
    wardrobe.wear("decode-0", lambda argv: [*argv, "--blocks", "7"])
    assert wardrobe("decode-0", ARGV) == [
        "enter", "/tmp/sockets", *ARGV, "--blocks", "7",
        "--host", "198.18.0.2", "--listen", "198.18.0.9:0",
    ]  # fmt: skip
    assert wardrobe("router", ARGV) == ARGV
