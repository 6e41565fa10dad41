"""The examples for authors of passes and lowerings, run as tests; and a lowering that disagrees is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import inspect_any_gpu
import tcport
import write_a_graph_pass
import write_a_lowering
from tcport.device.catalog import catalogue_profile
from tcport.errors import ArgumentError, LoweringRegistrationError
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.registry import rows
from tcport.testing import check_lowering, lower_on

OP = "example::squared_relu"


def test_the_pass_of_the_example() -> None:
    write_a_graph_pass.test_the_pass()
    x, y = torch.linspace(-3, 3, 24).view(4, 6), torch.full((4, 6), 2.0)
    report = tcport.explain(write_a_graph_pass.softplus, x, y)
    assert [p.matches for p in report.graphs[0].passes if p.name == "fuse_log1p"] == [1]
    compiled = torch.compile(write_a_graph_pass.softplus, backend="tcport")
    torch.testing.assert_close(compiled(x, y), 2 * torch.nn.functional.softplus(x))


def test_every_device_is_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_any_gpu.main(["h200", "mi300x"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["h200:", "paged_attention", "->", "triton_decode"],
        ["mi300x:", "paged_attention", "->", "triton_decode"],
    ]


def test_the_lowering_of_the_example_is_chosen_and_right() -> None:
    x = torch.linspace(-3, 3, 24).view(4, 6)
    report = tcport.explain(write_a_lowering.model, x)
    assert [(n.op, n.kernel, n.tier) for n in report.nodes] == [(OP, "fused_squared_relu", "torch")]
    assert report.nodes[0].chain[-1] == f"{OP} [torch]"
    assert "torch.ops.example" not in report.graphs[0].source
    compiled = torch.compile(write_a_lowering.model, backend="tcport")
    torch.testing.assert_close(compiled(x), torch.relu(x + 1) ** 2)
    assert check_lowering(OP, "fused_squared_relu") == 2
    there = lower_on(catalogue_profile("h200"), write_a_lowering.model, x)
    assert [(n.kernel, n.tier) for n in there] == [("fused_squared_relu", "tuned")]


def test_the_operator_itself_runs_where_no_lowering_fits() -> None:
    def refuses(spec: object, profile: object) -> Verdict:
        return Verdict.no("not today")

    kept = rows(OP)
    tcport.unregister_lowering(OP, "fused_squared_relu")
    try:
        tcport.register_lowering(OP, name="refuses")(refuses)
        x = torch.linspace(-3, 3, 24)
        report = tcport.explain(write_a_lowering.model, x)
        torch.testing.assert_close(torch.compile(write_a_lowering.model, backend="tcport")(x), torch.relu(x + 1) ** 2)
    finally:
        tcport.unregister_lowering(OP, "refuses")
        tcport.register_lowering(OP, name="fused_squared_relu", inputs=kept[0].inputs)(kept[0].lower)
    assert [n.kernel for n in report.nodes] == [OP]
    assert "not today" in report.nodes[0].rejected[0].reason


def test_a_lowering_that_disagrees_is_refused() -> None:
    def transposed(spec: object, profile: object) -> Candidate:
        return Candidate("transposed", "torch", lambda call, launch: torch.relu(call.args[0]).t())

    def never(spec: object, profile: object) -> Verdict:
        return Verdict.no("never")

    def wrong_numbers(spec: object, profile: object) -> Candidate:
        return Candidate("wrong", "torch", lambda call, launch: call.args[0] * call.args[1])

    def square() -> list[tuple[Tensor, float]]:
        return [(torch.ones(3, 5), 1.0)]

    with pytest.raises(LoweringRegistrationError, match=r"transposed of example::.*\[5, 3\].*operator float32\[3, 5\]"):
        tcport.register_lowering(OP, inputs=square)(transposed)
    with pytest.raises(LoweringRegistrationError, match="never of example::.* no candidate .*: never\\. Give"):
        tcport.register_lowering(OP, inputs=square)(never)
    with pytest.raises(LoweringRegistrationError, match="no operator 'example::missing'"):
        tcport.register_lowering("example::missing")(never)
    for op, inputs, answer, said in [
        (OP, square, None, "answered None. Return a Candidate of a tier among tuned"),
        (OP, square, "no", "answered 'n'"),
        (OP, square, Candidate("bad", "fast", lambda call, launch: call.args[0]), "answered Candidate"),  # type: ignore[arg-type]
        (OP, square, Candidate("other", "torch", lambda call, launch: call.args[0]), "calls its kernel other"),
        (OP, square, Candidate("bad", "torch", lambda call, launch: call.args[2]), "bad .*raised IndexError.*values"),
        (OP, square, Candidate("bad", "torch", lambda call, launch: call.args[0].max().item()), "raised RuntimeError"),
        (OP, square(), None, "has inputs of type list"),
        ("squared_relu", None, None, "no operator 'tcport::squared_relu'"),
        (OP + ".default", None, None, "no operator 'example::squared_relu.default'"),
        (OP.replace("::", "."), None, None, "no operator .* Write 'example::squared_relu'"),
        (write_a_lowering.squared_relu, None, None, "Give a text, 'namespace::name'"),
    ]:
        with pytest.raises(LoweringRegistrationError, match=said):
            tcport.register_lowering(op, name="bad", inputs=inputs)(lambda spec, profile, answer=answer: answer)  # type: ignore[arg-type]
    with pytest.raises(LoweringRegistrationError, match="vendor 'NVIDIA'.*'nvidia'"):
        tcport.register_lowering(OP, vendor="NVIDIA")
    assert [row.name for row in rows(OP)] == ["fused_squared_relu"]
    tcport.register_lowering(OP, name="wrong", inputs=lambda: [(torch.full((3,), -1.0), 2.0)])(wrong_numbers)
    try:
        with pytest.raises(AssertionError, match="not close"):
            check_lowering(OP, "wrong")
    finally:
        tcport.unregister_lowering(OP, "wrong")
    with pytest.raises(ArgumentError, match="no lowering 'absent'"):
        check_lowering(OP, "absent")
