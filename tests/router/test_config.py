"""A bad setting is refused by name."""

import pytest

from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig

GOOD = {"decode": ("http://127.0.0.1:1",)}


def test_slashes_at_the_end_are_dropped():
    assert RouterConfig(decode=("http://a:1/", "https://b/x/")).decode == (
        "http://a:1",
        "https://b/x",
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decode": ()}, "decode"),
        ({"decode": ("127.0.0.1:8000",)}, "decode"),
        ({"decode": ("ftp://a:1",)}, "decode"),
        ({"decode": ("http://a:99999",)}, "decode"),
        ({"decode": ("http://user:key@a:1",)}, "Authorization"),
        ({"decode": ("http://a:1", "http://a:1/")}, "twice"),
        ({"prefill": ("http://",)}, "prefill"),
        ({"on_no_prefill": "maybe"}, "on_no_prefill"),
        ({"inflight_max": 0}, "inflight_max"),
        ({"worker_lost_s": -1.0}, "worker_lost_s"),
        ({"port": 65536}, "port"),
    ],
)
def test_bad_settings(settings, named):
    with pytest.raises(ConfigError, match=named):
        RouterConfig(**{**GOOD, **settings})
