"""What the report says of one node's chain."""

from __future__ import annotations

import torch.fx

from tcport import quarantine
from tcport.chain import survivors
from tcport.device import DeviceProfile
from tcport.logs import logger
from tcport.lowering.operators import NodeChoice
from tcport.report import NodeReport, Rejected

_said: set[str] = set()


def node_report(node: torch.fx.Node, choice: NodeChoice) -> NodeReport:
    """The kernel of a node, the links behind it, and every kernel that was left with the reason.

    Raises:
        KernelBuildError: see :func:`tcport.chain.survivors`.
    """
    chain = survivors(choice)
    chosen = chain[0]
    rejected = [Rejected(r.kernel, r.reason, str(r.config) if r.config else "") for r in choice.selection.rejections]
    for candidate in choice.selection.candidates:
        reason = quarantine.reason(choice, candidate)
        if reason is not None:
            why = f"{reason.cause}: {reason.error}: {reason.message}"
            rejected.append(Rejected(candidate.kernel, why, str(candidate.config) if candidate.config else ""))
    report = NodeReport(
        node=node.name,
        op=choice.operator.name,
        device=_device_line(choice.profile),
        kernel=chosen.kernel,
        tier=chosen.tier,
        tile=str(chosen.config) if chosen.config else "",
        why=chosen.why,
        chain=tuple(map(str, chain)),
        rejected=tuple(rejected),
    )
    _say(f"{report.op} on {report.device}: {', then '.join(report.chain)}")
    return report


def _device_line(profile: DeviceProfile) -> str:
    return f"{profile.name or profile.arch or profile.vendor}" + (" (basic mode)" if profile.basic_mode else "")


def _say(line: str) -> None:
    """Log a choice once: every layer and every graph of a model makes the same one."""
    if line not in _said:
        _said.add(line)
        logger("chain").info("%s", line)
