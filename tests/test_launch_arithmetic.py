from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_tool.launch.arithmetic import Arithmetic
from bisect_tool.launch.words import Undecided


def value(text: str, **names: int) -> int:
    def get(name: str) -> int:
        if name not in names:
            raise Undecided(name)
        return names[name]

    return Arithmetic(text, get, names.__setitem__).value()


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(1, 1000))
def test_operators_bind_as_in_c(a: int, b: int, c: int) -> None:
    assert value("a + b * c - (a - b) * 2", a=a, b=b, c=c) == a + b * c - (a - b) * 2
    assert value("a < b == c > a", a=a, b=b, c=c) == int(int(a < b) == int(c > a))
    assert value("a / c * c + a % c", a=a, c=c) == a
    assert value("a & b | c ^ a", a=a, b=b, c=c) == a & b | c ^ a


def test_assignments_are_written_where_they_are_taken() -> None:
    names = {"i": 1}
    assert Arithmetic("i++, j = i + 1, i > 5 ? (k = 1) : (k = 2), 0 && (l = 1)", names.__getitem__, names.__setitem__).value() == 0
    assert names == {"i": 2, "j": 3, "k": 2}


def test_numbers_have_64_bits() -> None:
    assert value("2 ** 63") == -(2**63)
    assert value("2 ** 4000000") == 0
    assert value("9223372036854775807 + 1") == -(2**63)
    assert value("0x1F + 017") == 46
    assert value("") == 0


@pytest.mark.parametrize("text", ["1 +", "a", "1 / 0", "2 ** -1", "08", "1 2", "f(1)", "a[1]", "(1", "1 ? 2", "'1'", "9" * 5000])
def test_what_is_not_read_is_undecided(text: str) -> None:
    with pytest.raises(Undecided):
        value(text)
