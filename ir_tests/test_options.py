"""Options and mode of the backend: what is accepted, and how a mistake is answered."""

from __future__ import annotations

import pytest

from tcport.errors import OptionError
from tcport.options import Options, parse_options


def names() -> list[str]:
    return ["max_autotune", "triton.cudagraphs", "epilogue_fusion"]


def test_nothing_given_gives_the_defaults() -> None:
    assert parse_options(None, None, names) == Options()
    assert parse_options("default", {}, names).to_dict() == {}


def test_own_options_and_inductors_are_told_apart() -> None:
    parsed = parse_options(None, {"kernel": "torch_attention", "max_autotune": True}, names)
    assert parsed.kernel == "torch_attention"
    assert parsed.inductor == (("max_autotune", True),)
    assert parsed.to_dict() == {"kernel": "torch_attention", "inductor": {"max_autotune": True}}


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        (None, {"kernal": "x"}, "'kernel'"),
        (None, {"max_autotun": True}, "'max_autotune'"),
        (None, {"zzzzzz": 1}, "Options of tcport: level, kernel, strict"),
        (None, {"level": "half"}, "'full', 'attention'"),
        (None, {"strict": 1}, "True or False"),
        (None, {"kernel": None}, "kernel's name"),
        (None, {"passes": "select_tiles"}, "list of pass names"),
        (None, {"disable_passes": [3]}, "something other than strings"),
        ("reduce-overheat", None, "'reduce-overhead'"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(mode: str | None, options: dict | None, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(mode, options, names)
    assert said in str(caught.value)
