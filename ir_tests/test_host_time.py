"""Host times by the bench: what it calls is the same graph each time, and what it counts is in the code."""

from __future__ import annotations

import pytest
import torch

from tcport._inductor.calls import generated_code
from tcport.bench.host_time import GRAPHS, Row, inputs, main, measure


def test_generated_code_gives_the_results_of_the_graph_again_and_again() -> None:
    x = torch.arange(6.0).view(2, 3)
    compiled = torch.compile(lambda x, y: x.sin() + y, fullgraph=True)
    code = generated_code(compiled, x, torch.ones(3))
    for _ in range(2):
        torch.testing.assert_close(code()[0], x.sin() + 1)


@pytest.mark.parametrize(
    ("name", "operators"), [("attention", 1), ("write and attention", 2), ("8 times write and attention", 16)]
)
def test_each_call_of_a_kernel_is_counted(name: str, operators: int) -> None:
    with torch.no_grad():
        row = measure(name, "cpu", dynamic=True, calls=3)
    assert (row.launches, row.operators) == (0, operators)
    assert min(row.eager, row.compiled, row.generated) > 0


def test_a_plain_graph_has_as_many_tensors() -> None:
    """Its guards and wrappers are those of a graph with attention, without attention."""
    args = inputs("cpu", None)
    for plain, ours in (("plain graph", "attention"), ("plain graph that writes", "write and attention")):
        given = [GRAPHS[name][0].__code__.co_varnames for name in (plain, ours)]
        assert given[0] == given[1]
    query, k, v, k_cache, v_cache, slots, table, lens, _ = args
    GRAPHS["plain graph that writes"][0](*args)
    torch.testing.assert_close(k_cache[0, 0], k[0] + slots[0])
    torch.testing.assert_close(v_cache[0, 0], v[0])
    want = query + k_cache[0, 0, 0] + v_cache[0, 0, 0] + table[0, 0] + lens[0]
    torch.testing.assert_close(GRAPHS["plain graph"][0](*args), want)


def test_the_table_has_a_line_for_each_graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    arguments = ["host_time", "--device", "cpu", "--calls", "2", "--graph", "plain graph"]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[2:]] == ["plain graph", "plain graph"]
    assert str(Row("x", 1.0, 2.25, 0.5, 3, 4)).split() == ["x", "1.0", "2.2", "0.5", "3", "4"]
