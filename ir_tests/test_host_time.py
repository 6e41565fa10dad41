"""Host times by the bench: what it calls is the same graph each time, and what it counts is in the code."""

from __future__ import annotations

import pytest
import torch

from tcport._inductor.calls import generated_code
from tcport._inductor.launch import launching_nothing
from tcport.bench.host_graphs import SUBJECTS, Subject
from tcport.bench.host_time import Row, main, measure
from tcport.kernels import reference

LAYERS, PLAIN_LAYERS = "layers of attention", "layers of plain kernels"


def subject(name: str) -> Subject:
    (found,) = (each for each in SUBJECTS if each.name == name)
    return found


def test_generated_code_gives_the_results_of_the_graph_again_and_again() -> None:
    x = torch.arange(6.0).view(2, 3)
    compiled = torch.compile(lambda x, y: x.sin() + y, fullgraph=True)
    code, source = generated_code(compiled, x, torch.ones(3))
    for _ in range(2):
        torch.testing.assert_close(code()[0], x.sin() + 1)
    assert "def call(" in source


def test_launches_come_back_after_a_time_without() -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run = CachingAutotuner.run
    kernel = CachingAutotuner.__new__(CachingAutotuner)  # of no function: a launch would raise
    with pytest.raises(AttributeError):
        kernel.run(1, stream=0)
    with launching_nothing():
        assert kernel.run(1, stream=0) is None
    assert CachingAutotuner.run is run
    with pytest.raises(ZeroDivisionError), launching_nothing():
        raise ZeroDivisionError
    assert CachingAutotuner.run is run


@pytest.mark.parametrize(
    ("name", "layers", "operators"),
    [
        ("attention", 1, 1),
        ("write and attention", 1, 2),
        ("8 times write and attention", 1, 16),
        (LAYERS, 3, 6),
        (PLAIN_LAYERS, 3, 6),
    ],
)
def test_each_call_of_a_kernel_is_counted(name: str, layers: int, operators: int) -> None:
    with torch.no_grad():
        row = measure(subject(name), "cpu", dynamic=True, calls=3, layers=layers)
    assert (row.launches, row.operators) == (0, operators)
    assert min(row.eager, row.compiled, row.generated, row.unlaunched) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_of_plain_kernels_launches_two(dynamic: bool) -> None:
    with torch.no_grad():
        row = measure(subject(PLAIN_LAYERS), "cuda", dynamic, calls=3, layers=2)
    assert (row.launches, row.operators, row.tensors) == (4, 0, 2)


@pytest.mark.parametrize("name", ["attention", LAYERS])
def test_batch_and_table_width_equal_no_size_that_a_kernel_is_made_for(name: str) -> None:
    """Sizes that are equal where a graph is traced get one symbol, and what is made for one is made for both."""
    query, k, *rest = subject(name).inputs("cpu")
    table, lens, _ = rest[-3:]
    made_for = {*query.shape[1:], *k.shape[1:], 16}
    assert len({*table.shape, *made_for}) == len(made_for) + 2
    assert lens.shape[0] == table.shape[0]


def test_a_plain_graph_has_as_many_tensors() -> None:
    """Its guards and wrappers are those of a graph with attention, without attention."""
    args = subject("attention").inputs("cpu")
    pairs = (("plain graph", "attention"), ("plain graph that writes", "write and attention"), (PLAIN_LAYERS, LAYERS))
    for names in pairs:
        plain, ours = (subject(name).graph.__code__ for name in names)
        assert plain.co_varnames[: plain.co_argcount] == ours.co_varnames[: ours.co_argcount]
    query, k, v, k_cache, v_cache, slots, table, lens, _ = args
    subject("plain graph that writes").graph(*args)
    torch.testing.assert_close(k_cache[0, 0], k[0] + slots[0])
    torch.testing.assert_close(v_cache[0, 0], v[0])
    want = query + k_cache[0, 0, 0] + v_cache[0, 0, 0] + table[0, 0] + lens[0]
    torch.testing.assert_close(subject("plain graph").graph(*args), want)


def test_each_layer_has_caches_of_its_own() -> None:
    query, k, v, caches, slots, table, lens, bounds = subject(LAYERS).inputs("cpu", layers=2)
    assert len({cache.data_ptr() for pair in caches for cache in pair}) == 4
    out = subject(LAYERS).graph(query, k, v, caches, slots, table, lens, bounds)
    for k_cache, v_cache in caches:
        torch.testing.assert_close(k_cache.flatten(0, 1)[slots], k)
        query = reference.paged_attention(query, k_cache, v_cache, table, lens)[0]
    torch.testing.assert_close(out, query)


def test_a_layer_of_plain_kernels_writes_and_reads() -> None:
    query, k, v, caches, slots, table, lens, bounds = subject(PLAIN_LAYERS).inputs("cpu", layers=2)
    want = query
    table = table.flip(1).contiguous()
    out = subject(PLAIN_LAYERS).graph(query, k, v, caches, slots, table, lens, bounds)
    for k_cache, v_cache in caches:
        torch.testing.assert_close(k_cache.flatten(0, 1)[slots], k)
        torch.testing.assert_close(v_cache.flatten(0, 1)[slots], v)
        added = [k_cache[table[token, 0], 0, 0, 0] + v_cache[table[token, 0], 0, 0, 0] for token in range(len(query))]
        want = want + (torch.stack(added) + lens)[:, None, None]
    torch.testing.assert_close(out, want)


def test_the_table_has_a_line_for_each_graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def lines(*arguments: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["host_time", "--device", "cpu", "--calls", "2", *arguments])
        main()
        return capsys.readouterr().out.splitlines()[2:]

    assert [line.split(",")[0] for line in lines("--graph", "plain graph")] == ["plain graph", "plain graph"]
    of_layers = lines("--layers", "3", "--graph", PLAIN_LAYERS)
    names = [f"{PLAIN_LAYERS}: 1", f"{PLAIN_LAYERS}: 3", "  each layer more"]
    assert [line[:42].split(",")[0].rstrip() for line in of_layers] == names * 2
    assert [line.split()[-3:-1] for line in of_layers] == [["0", "2"], ["0", "6"], ["0", "2"]] * 2
    with pytest.raises(SystemExit):
        lines("--layers", "1")
    assert "--layers: a graph of many layers has at least 2" in capsys.readouterr().err


def test_what_a_layer_takes_is_the_difference_by_the_number_of_layers() -> None:
    one, nine = (
        Row("x", 1.0, 2.25, 0.5, 0.25, 3, 4, 5),
        Row("y", 17.0, 10.25, 4.5, 0.25, 27, 4, 21),
    )
    assert str(one).split() == ["x", "1.0", "2.2", "0.5", "0.2", "3", "4", "5"]
    assert nine.each_beyond(one, 8) == Row("  each layer more", 2.0, 1.0, 0.5, 0.0, 3, 0, 2)
